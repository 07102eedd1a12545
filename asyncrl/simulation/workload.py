"""What a simulation plays back: scripts of trajectories, and what sampling, training and publishing cost.

``recorded`` takes them from a run's events; here they are made from distributions, for a run that never was. Steps per
hour are those of the steady state, of simulated and real runs alike. Left out: the first ``max_staleness + 1`` steps,
whose groups were all admitted before the first one; the last ``max_staleness`` steps, during which nothing is left to
admit; and evaluations. A run that is too short for that is counted whole but for its first step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.simulation.cost import Cost, LoadModel
from asyncrl.simulation.grid import RunOptions
from asyncrl.simulation.options import Distribution, Durations

__all__ = [
    "GroupScript",
    "MemberScript",
    "StepEnd",
    "TurnScript",
    "Workload",
    "around_steady",
    "make_workload",
    "steady_steps",
    "steps_per_hour",
]


_SECONDS_PER_TOKEN = 0.02
_PER_REQUEST = 0.01
# Of a token's time, for each further request in flight: at a hundred a token takes twice as long.
_MEAN_OF_BOUND = 0.25
# Mean length of a turn, as a part of what the budget would let it have.
_SIGMA = 0.8
_PUBLICATION = 0.1
# Of the training time.


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnScript:
    """One turn: what the model reads anew, what it writes, and how long the environment takes to answer.

    Example: a prompt of 40 tokens of which a sibling had 30 in the cache, 200 tokens written, a tool of 1.5 seconds::

        TurnScript(new_tokens=40, uncached_tokens=10, tokens=200, reply_s=1.5)
    """

    new_tokens: int
    """Context that was not there in the turn before: the prompt, or the environment's messages."""
    uncached_tokens: int
    """Context tokens that the server computes if it still has the earlier turns in its cache."""
    tokens: int
    """Sampled tokens. ``Budget.segment_tokens`` of the simulated recipe divides them into requests."""
    reply_s: float
    """From the last token to the wish for the next one; after the last turn, to the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberScript:
    """One trajectory."""

    turns: tuple[TurnScript, ...]
    reward: float
    truncated: bool = False
    """It did not end by itself: after the last turn it would have gone on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScript:
    """The trajectories of one row; lengths and rewards within a group belong together."""

    members: tuple[MemberScript, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that takes time in a run."""

    groups: Sequence[GroupScript]
    """In the order of the run; the simulated run has its own number of them, see ``rows``."""
    sampling: LoadModel
    """Of a request: (1, tokens, uncached context tokens)."""
    training: Cost
    """Of a forward-backward pass: (1, sequences, trained tokens)."""
    optimizer: Cost
    """Of an optimizer step: (1,)."""
    staging: Cost
    """From the commit until the trainer may go on: (1,)."""
    publication: LoadModel
    """From there until the samplers have the version: (1,). They finish first what they are doing."""
    reset_s: float = 0.0
    """What an environment takes before the first request."""
    margins: tuple[int, int] = (0, 0)
    """Of the groups so many at the beginning and at the end are not of the steady state."""

    def rows(self, *, before: int, counted: int, after: int) -> list[GroupScript]:
        """Groups for a simulated run: those that count are spread evenly over the steady state, in their order.

        So a run that changes is all there, and every schedule is measured on the same part of it. ``before`` and
        ``after`` them are groups of its beginning and its end.
        """
        first, last = self.margins
        end = len(self.groups) - last
        return [
            *_spread(self.groups[:first] or self.groups, before),
            *_spread(self.groups[first:end] or self.groups, counted),
            *_spread(self.groups[end:] or self.groups, after),
        ]


def _spread(groups: Sequence[GroupScript], count: int) -> list[GroupScript]:
    return [groups[place * len(groups) // count] for place in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """A trainer step ended at loop time ``time``; the last ``evaluation_s`` of it were an evaluation."""

    time: float
    evaluation_s: float = 0.0


def around_steady(max_staleness: int) -> tuple[int, int]:
    """Steps before and after the steady ones."""
    return max_staleness + 1, max_staleness


def steady_steps(count: int, max_staleness: int) -> range:
    """Indices of the steps of a run of ``count`` that are counted; empty if there is only one."""
    before, after = around_steady(max_staleness)
    steady = range(before, count - after)
    return steady if steady else range(1, count)


def steps_per_hour(steps: Sequence[StepEnd], max_staleness: int) -> float | None:
    """Of the steady state; None if no time passed in it."""
    counted = steady_steps(len(steps), max_staleness)
    seconds = sum(steps[i].time - steps[i - 1].time - steps[i].evaluation_s for i in counted)
    return 3600 * len(counted) / seconds if seconds > 0 else None


def make_workload(run: RunOptions, durations: Durations, *, groups: int, seed: int) -> Workload:
    """``groups`` groups of the run's size.

    Defaults: ``budget.max_turns`` turns of a quarter of the tokens that the budget allows each, sigma 0.8; 0.02 seconds
    a token and 1 % of that for each further request in flight; tools of 1 second with sigma 1 between turns; training a
    batch takes as long as sampling it at the run's concurrency, publishing a tenth of that.
    """
    source = random.Random(seed)
    turns = durations.turns or run.budget.max_turns
    tokens = durations.turn_tokens or Distribution(
        mean=max(1.0, _MEAN_OF_BOUND * _turn_bound(run, turns)), sigma=_SIGMA
    )
    base, per_request = durations.seconds_per_token or (_SECONDS_PER_TOKEN, _SECONDS_PER_TOKEN * _PER_REQUEST)
    tools = durations.tool_seconds or Distribution(mean=1.0, sigma=1.0)
    _, groups_per_step, group_size = run.shape
    sequences = groups_per_step * group_size
    train_s = durations.train_seconds
    if train_s is None:
        train_s = sequences * turns * tokens.mean * (base / run.schedule.concurrency + per_request)
    publish_s = _PUBLICATION * train_s if durations.publish_seconds is None else durations.publish_seconds
    return Workload(
        groups=[_group(source, group_size, turns, tokens, tools) for _ in range(groups)],
        sampling=LoadModel(own=(0.0, base - per_request, 0.0), shared=(0.0, per_request, 0.0)),
        training=Cost(coefficients=(0.0, train_s / sequences, 0.0)),
        optimizer=Cost(coefficients=(0.0,)),
        staging=Cost(coefficients=(0.0,)),
        publication=LoadModel(own=(publish_s,), shared=(0.0,)),
    )


def _turn_bound(run: RunOptions, turns: int) -> float:
    share = run.budget.max_generated_tokens / turns
    return share if run.budget.max_turn_tokens is None else min(share, run.budget.max_turn_tokens)


def _group(source: random.Random, size: int, turns: int, tokens: Distribution, tools: Distribution) -> GroupScript:
    """Half of the variance of the logarithm of lengths is the row's: hard rows are long for all members."""
    row = source.gauss()
    members = []
    for _ in range(size):
        lengths = [tokens.draw(source, normal=(row + source.gauss()) / math.sqrt(2)) for _ in range(turns)]
        members.append(
            MemberScript(
                turns=tuple(
                    TurnScript(
                        new_tokens=1,
                        uncached_tokens=1,
                        tokens=max(1, round(length)),
                        reply_s=tools.draw(source) if place < turns - 1 else 0.0,
                    )
                    for place, length in enumerate(lengths)
                ),
                reward=source.random(),
            )
        )
    return GroupScript(members=tuple(members))
