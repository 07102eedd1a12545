"""What to change in a run: rules from its metrics to one sentence each, with the option that changes it.

A rule looks at means over the last ``RECENT`` steps, because one step says little. Rules that do not fit say nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from asyncrl.observe.runfiles import RunFiles

__all__ = ["PHASES", "RECENT", "Trend", "advice", "mean", "phase_shares", "recent", "trend"]

RECENT = 10
PHASES = {
    "train/wait_for_samples_seconds": "waiting for samples",
    "train/barrier_seconds": "waiting at the barrier",
    "train/forward_backward_seconds": "forward and backward",
    "train/optimizer_seconds": "optimizer, saving",
    "train/publication_seconds": "publishing weights",
}
Trend: TypeAlias = Literal["rising", "falling", "level", "no clear trend", "too few to tell"]
_LEAST_POINTS = 5
_LEAST_STEPS = 3
_LONG_RUN = 50
_TOOL_CALLS = "rollout/tool_calls"


def mean(values: Iterable[float]) -> float:
    """Of the finite ones; NaN if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def trend(values: Sequence[float]) -> Trend:
    """Whether the last fifth differs from the first by more than chance makes it."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < _LEAST_POINTS:
        return "too few to tell"
    fifth = math.ceil(len(finite) / 5)
    change = statistics.fmean(finite[-fifth:]) - statistics.fmean(finite[:fifth])
    steps = [after - before for before, after in itertools.pairwise(finite)]
    # The difference of two means of independent values: differences of neighbours vary by twice the variance of one.
    noise = statistics.pstdev(steps) / math.sqrt(fifth)
    if max(finite) - min(finite) <= 1e-9 * max(map(abs, finite)):
        return "level"
    return "no clear trend" if abs(change) <= 2 * noise else "rising" if change > 0 else "falling"


def recent(run: RunFiles, key: str) -> float:
    """The mean of a metric over the last steps; NaN if it is not known."""
    return mean(step.get(key, math.nan) for step in run.steps[-RECENT:])


def phase_shares(run: RunFiles) -> dict[str, float]:
    """Key -> its share of the seconds of the last steps, in the order of a step. Empty if they are not known."""
    total = recent(run, "train/batch_seconds")
    seconds = {key: recent(run, key) for key in PHASES}
    if not total > 0:
        return {}
    return {key: value / total for key, value in seconds.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """What the rules look at."""

    run: RunFiles
    shares: dict[str, float]
    answers: Sequence[str] = ()
    """The last words of the best member of some groups."""
    reward: Trend = "too few to tell"
    means: dict[str, float] = field(default_factory=dict)

    def recent(self, key: str, otherwise: float = 0.0) -> float:
        if key not in self.means:
            self.means[key] = recent(self.run, key)
        value = self.means[key]
        return otherwise if math.isnan(value) else value

    def share(self, key: str) -> float:
        return self.shares.get(f"train/{key}_seconds", 0.0)

    @property
    def bound_to_work_ahead(self) -> int:
        """The smallest ``max_staleness`` with which sampling goes on while the run trains."""
        return 2 * int(self.run.plan("minibatches") or 1) * int(self.run.plan("epochs") or 1) - 1

    @property
    def is_synchronous(self) -> bool:
        """True if it is known that nothing is sampled while the run trains."""
        bound = self.run.plan("max_staleness")
        return isinstance(bound, int) and bound < self.bound_to_work_ahead


def advice(run: RunFiles, answers: Sequence[str] = ()) -> list[str]:
    """One sentence for each rule that fits, the weightiest first.

    ``answers``: the last words of the best member of different groups, from the newest step that is kept.
    """
    found = _Findings(
        run=run, shares=phase_shares(run), answers=answers, reward=trend(run.series("reward/mean")), means={}
    )
    return [said for rule in _RULES if (said := rule(found)) is not None]


def _failing(found: _Findings) -> str | None:
    failed = found.recent("groups/failed_members")
    trained = found.recent("train/active_sequences")
    attempts = sum(entry.count for entry in found.run.failures)
    if failed > max(1.0, trained) or (attempts and not found.run.steps):
        return "Most members fail: mend the first of the failures above before anything else."
    if failed > 0.1 * (failed + trained):
        return f"{failed / (failed + trained):.0%} of the members fail, and are not trained: see the failures above."
    return None


def _nothing_trained(found: _Findings) -> str | None:
    last = found.run.steps[-RECENT:]
    if len(last) >= _LEAST_STEPS and all(step.get("train/updated", 1.0) == 0 for step in last):
        return (
            f"The last {len(last)} steps changed nothing: no member had a reward that differs from its group's. "
            "Read some conversations, and look at your reward function."
        )
    return None


def _zero_variance(found: _Findings) -> str | None:
    silent = found.recent("reward/zero_variance_group_frac")
    if len(found.run.steps) < _LEAST_STEPS or silent < 0.7:
        return None
    return (
        f"In {silent:.0%} of the groups all members have the same reward, and nothing is learnt from those. If the "
        "rows are too hard or too easy, take others; give partial credit; or raise trainer.group_size."
    )


def _wait_for_samples(found: _Findings) -> str | None:
    share = found.share("wait_for_samples")
    if share < 0.5:
        return None
    if found.is_synchronous:
        return (
            f"{share:.0%} of the time the trainer waits for samples: trainer.max_staleness = "
            f"{found.bound_to_work_ahead} lets sampling go on while it trains."
        )
    return (
        f"{share:.0%} of the time the trainer waits for samples: raise schedule.concurrency or schedule.admit_ahead, "
        "or add servers."
    )


def _barrier(found: _Findings) -> str | None:
    share = found.share("barrier")
    if share < 0.25:
        return None
    doing = found.run.waits[0].doing if found.run.waits else ""
    where = f" (longest: {doing})" if doing else ""
    return (
        f"{share:.0%} of the time all wait for one slow group{where}: speed up what it does, bound [budget], or raise "
        "trainer.max_staleness."
    )


def _forward_backward(found: _Findings) -> str | None:
    share = found.share("forward_backward")
    if share < 0.6 or not found.run.plan("max_staleness") or found.is_synchronous:
        return None
    return (
        f"{share:.0%} of the time is training itself: samples are there in time, so a lower trainer.max_staleness "
        "gives younger tokens at the same speed."
    )


def _publication(found: _Findings) -> str | None:
    share = found.share("publication")
    if share < 0.25:
        return None
    return (
        f"{share:.0%} of the time goes into publishing weights: train a LoRA adapter ([lora]), or raise "
        "trainer.max_staleness so that fewer groups wait for it."
    )


def _cut_answers(found: _Findings) -> str | None:
    share = found.recent("truncated/generated_tokens")
    if share < 0.2:
        return None
    return f"{share:.0%} of the conversations are cut off for their length: raise budget.max_generated_tokens."


def _cut_context(found: _Findings) -> str | None:
    share = found.recent("truncated/context")
    if share < 0.1:
        return None
    return (
        f"{share:.0%} of the conversations fill their context: raise budget.max_context_tokens (and the server's), or "
        "lower budget.tool_output_tokens."
    )


def _cut_turns(found: _Findings) -> str | None:
    share = found.recent("truncated/turns")
    if share < 0.3:
        return None
    return f"{share:.0%} of the conversations end because they have no turn left: raise budget.max_turns."


def _tools_unused(found: _Findings) -> str | None:
    last = found.run.steps[-RECENT:]
    names = sorted({key.removeprefix(f"{_TOOL_CALLS}/") for step in last for key in step if f"{_TOOL_CALLS}/" in key})
    if len(last) < _LEAST_STEPS or not names or any(step.get(_TOOL_CALLS, 0.0) for step in last):
        return None
    return (
        f"The model calls no tool, though there {'is' if len(names) == 1 else 'are'} {', '.join(names)}: look at the "
        "prompt with asyncrl render, and see rollout.announce_tools."
    )


def _tools_failing(found: _Findings) -> str | None:
    calls, errors = found.recent(_TOOL_CALLS), found.recent("rollout/tool_errors")
    if not calls or errors < 0.5 * calls:
        return None
    return f"{min(1.0, errors / calls):.0%} of the tool calls end with an error: read what the tools answer."


def _shorter_answers(found: _Findings) -> str | None:
    lengths = [length for length in found.run.series("length/generated_p50") if math.isfinite(length)]
    if found.reward != "rising" or len(lengths) < _LEAST_POINTS:
        return None
    fifth = math.ceil(len(lengths) / 5)
    before, after = mean(lengths[:fifth]), mean(lengths[-fifth:])
    if before < 4 or after > before / 2:
        return None
    return (
        f"The reward rises while answers get shorter (median {before:.0f} -> {after:.0f} tokens). That can be a reward "
        "that is easy to trick: read the best conversations (--best)."
    )


def _equal_answers(found: _Findings) -> str | None:
    answers = [answer.strip() for answer in found.answers if answer.strip()]
    if len(answers) < 4 or len(set(answers)) > 1:
        return None
    return (
        "The best answers to different rows are word for word the same. That can be a reward that is easy to trick: "
        "read them (--best)."
    )


def _overfitted(found: _Findings) -> str | None:
    heldout = trend([evaluation.get("reward_mean", math.nan) for evaluation in found.run.evaluations])
    if found.reward != "rising" or heldout != "falling":
        return None
    return "The reward rises, but falls on held-out rows: take more rows, fewer steps, or a lower optimizer.lr."


def _no_trend(found: _Findings) -> str | None:
    steps = len(found.run.steps)
    if steps < _LONG_RUN or found.reward not in ("no clear trend", "falling", "level"):
        return None
    rate = found.run.plan("optimizer.lr")
    now = f" (now {rate:g})" if isinstance(rate, int | float) else ""
    return (
        f"After {steps} steps the reward does not rise: read the best and the worst conversations - does the reward "
        f"tell them apart rightly? - and then try another optimizer.lr{now}."
    )


def _masked(found: _Findings) -> str | None:
    share = found.recent("staleness/frac_masked")
    if share < 0.2:
        return None
    return (
        f"{share:.0%} of the tokens are too old to be trained: raise trainer.max_staleness, or wait for them with "
        'trainer.stale_policy = "wait".'
    )


def _far_from_policy(found: _Findings) -> str | None:
    share = found.recent("ratio/effective_sample_frac", otherwise=1.0)
    if share > 0.3:
        return None
    return (
        f"The trained tokens are worth {share:.0%} of as many fresh ones, so far is the policy from the one that "
        "sampled them: lower trainer.max_staleness, trainer.epochs or optimizer.lr, or look at mismatch/max."
    )


def _wasted(found: _Findings) -> str | None:
    made, wasted = found.recent("sampling/generated_tokens"), found.recent("sampling/wasted_tokens")
    if not made or wasted < 0.3 * made:
        return None
    return (
        f"{min(1.0, wasted / made):.0%} of the sampled tokens are never trained: see the failures above, and what "
        "is cut off or dropped."
    )


def _loop_held(found: _Findings) -> str | None:
    worst = max((step.get("loop/lag_max_seconds", 0.0) for step in found.run.steps[-RECENT:]), default=0.0)
    if not worst > 1:
        return None
    return (
        f"Something held all conversations up for {worst:.1f} s at once: a function of yours that computes or waits "
        "should be a plain def (it gets a thread) or rl.in_process, not async."
    )


_RULES: tuple[Callable[[_Findings], str | None], ...] = (
    _failing,
    _nothing_trained,
    _equal_answers,
    _shorter_answers,
    _zero_variance,
    _tools_unused,
    _tools_failing,
    _cut_answers,
    _cut_context,
    _cut_turns,
    _overfitted,
    _no_trend,
    _wait_for_samples,
    _barrier,
    _forward_backward,
    _publication,
    _masked,
    _far_from_policy,
    _wasted,
    _loop_held,
)
