"""The numbers of a trainer step: what its batch was, and what happened since the step before.

``BatchMetrics`` looks at the groups of the batch. ``MetricsRecorder`` sums events between two steps; work for later
batches counts too, because it is what the machines did in that time. Every key is in every step, zero if nothing
happened; ``rollout/<key>`` follows the environment, and stays once it was there: a sum over the members, with the sum
for each member of the batch beside it (``rollout/<key>_mean``). Left out, because only their owners
know them: what the learner reports (``loss/*``, ``optimizer/*``) and how a step was assembled and timed (``train/*``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.events import (
    BarrierOpened,
    ChunkTrained,
    Event,
    GroupDropped,
    GroupRerolled,
    MemberDiscarded,
    MemberFailed,
    MemberResumed,
    RequestRepeated,
    SegmentSampled,
    VersionCommitted,
    VersionPublished,
)
from asyncrl.plain import metric, numbers
from asyncrl.types import BarrierWait, DropReason, Group, Trajectory, TruncationCause

__all__ = ["COUNTED", "BatchMetrics", "MetricsRecorder", "percentile", "rollout_metrics"]

_SUMMED = (
    "publication/seconds",
    "publication/versions",
    "sampling/cached_prompt_tokens",
    "sampling/generated_tokens",
    "sampling/kv_refreshes",
    "sampling/late_requests",
    "sampling/prompt_tokens",
    "sampling/queue_seconds",
    "sampling/repeated_requests",
    "sampling/request_seconds",
    "sampling/requests",
    "sampling/wasted_tokens",
    "staleness/wait_count",
    "staleness/wait_seconds",
    "train/backward_chunks",
    "train/datums",
    "train/updated",
)
_TOOLS = ("tool_calls", "tool_errors", "tool_seconds")


class MetricsRecorder:
    """Owns the sums since the last step. Subscribe ``observe`` to ``COUNTED``; ``started`` is the loop time now."""

    def __init__(self, *, started: float) -> None:
        self._since = started
        self._sums = dict.fromkeys(_SUMMED, 0.0)
        self._longest: BarrierWait | None = None

    def observe(self, event: Event) -> None:
        """Count ``event``."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def sums(self) -> dict[str, float]:
        """What was counted since the last step."""
        return dict(self._sums)

    def resume(self, sums: Mapping[str, float]) -> None:
        """An earlier process had counted ``sums``."""
        for key in self._sums.keys() & sums.keys():
            self._sums[key] += sums[key]

    def add_wasted(self, tokens: int) -> None:
        """Count generated tokens that will never be trained."""
        self._sums["sampling/wasted_tokens"] += tokens

    def take(self, now: float, gauges: Mapping[str, float]) -> dict[str, float]:
        """The metrics of the interval that ends ``now`` (loop time), and start the next one.

        ``gauges`` are values that their owners read at this moment; they are passed through.
        """
        seconds = now - self._since
        metrics = {**self._sums, **gauges}
        metrics["sampling/interval_seconds"] = seconds
        metrics["sampling/generated_tokens_per_second"] = _ratio(metrics["sampling/generated_tokens"], seconds)
        metrics["sampling/cached_prompt_fraction"] = _ratio(
            metrics["sampling/cached_prompt_tokens"], metrics["sampling/prompt_tokens"]
        )
        longest = self._longest
        metrics["staleness/wait_group"] = -1.0 if longest is None else float(longest.group)
        metrics["staleness/wait_member"] = -1.0 if longest is None else float(longest.member)
        self._since = now
        self._sums = dict.fromkeys(_SUMMED, 0.0)
        self._longest = None
        return metrics

    def _count_segment(self, event: SegmentSampled) -> None:
        sums = self._sums
        sums["sampling/requests"] += 1
        sums["sampling/generated_tokens"] += event.tokens
        sums["sampling/prompt_tokens"] += event.prompt_tokens
        sums["sampling/cached_prompt_tokens"] += event.cached_tokens
        sums["sampling/kv_refreshes"] += event.refilled
        sums["sampling/wasted_tokens"] += event.cut_tokens
        sums["sampling/queue_seconds"] += event.queue_seconds
        sums["sampling/request_seconds"] += event.seconds

    def _count_repeat(self, event: RequestRepeated) -> None:
        self._sums["sampling/repeated_requests"] += 1
        self._sums["sampling/late_requests"] += event.cause == "late"

    def _count_wait(self, event: BarrierOpened) -> None:
        self._sums["staleness/wait_seconds"] += event.wait.seconds
        self._sums["staleness/wait_count"] += 1
        if self._longest is None or event.wait.seconds > self._longest.seconds:
            self._longest = event.wait

    def _count_chunk(self, event: ChunkTrained) -> None:
        self._sums["train/backward_chunks"] += 1
        self._sums["train/datums"] += event.sequences

    def _count_version(self, event: VersionCommitted) -> None:
        self._sums["train/updated"] += 1

    def _count_publication(self, event: VersionPublished) -> None:
        self._sums["publication/seconds"] += event.seconds
        self._sums["publication/versions"] += 1

    def _count_waste(
        self, event: MemberFailed | MemberDiscarded | GroupDropped | GroupRerolled | MemberResumed
    ) -> None:
        if not (isinstance(event, MemberResumed) and event.recovered):
            self.add_wasted(event.generated_tokens)


_HANDLERS: Mapping[type[Event], Callable[[MetricsRecorder, Any], None]] = {
    RequestRepeated: MetricsRecorder._count_repeat,
    SegmentSampled: MetricsRecorder._count_segment,
    BarrierOpened: MetricsRecorder._count_wait,
    ChunkTrained: MetricsRecorder._count_chunk,
    VersionCommitted: MetricsRecorder._count_version,
    VersionPublished: MetricsRecorder._count_publication,
    MemberFailed: MetricsRecorder._count_waste,
    MemberDiscarded: MetricsRecorder._count_waste,
    GroupDropped: MetricsRecorder._count_waste,
    GroupRerolled: MetricsRecorder._count_waste,
    MemberResumed: MetricsRecorder._count_waste,
}
COUNTED = tuple(_HANDLERS)
"""The events to subscribe to."""


class BatchMetrics:
    """Adds up the groups of a batch that is trained while ``version`` is committed; constant work for each member.

    Ages are in versions and of trained tokens only: one per generated span whatever its length, or weighted by tokens
    (``staleness/age_tokens/<age>`` up to ``max_staleness``, ``/older`` beyond; their sum is ``train/active_tokens``).
    Members that failed or were dropped have none. ``masked``: tokens beyond the bound are not trained either.
    Percentiles are values that occur. Rewards are the raw ones, before any truncation rule. ``tools``: names that have
    a metric even if nobody calls them.
    """

    def __init__(self, *, version: int, max_staleness: int, masked: bool = False, tools: Sequence[str] = ()) -> None:
        self._version = version
        self._max_staleness = max_staleness
        self._masked = masked
        self._rewards: list[float] = []
        self._span_ages: Counter[int] = Counter()
        self._token_ages: Counter[int] = Counter()
        self._masked_tokens = 0
        self._lengths: list[int] = []
        self._truncated: Counter[TruncationCause] = Counter()
        self._environment = dict.fromkeys((*_TOOLS, *(f"tool_calls/{name}" for name in tools)), 0.0)
        self._group_seconds: list[float] = []
        self._closed = 0
        self._failed = 0

    def add(self, group: Group) -> None:
        """Count ``group``."""
        self._group_seconds.append(group.seconds)
        self._closed += group.closed_by_deadline
        for member in group.members_G:
            self._add_member(member)

    def _add_member(self, member: Trajectory) -> None:
        if member.reward is not None:
            self._rewards.append(member.reward)
        if member.is_trained:
            self._count_ages(member)
        self._lengths.append(member.generated_tokens)
        if member.truncated is not None:
            self._truncated[member.truncated] += 1
        for key, value in numbers(member.metrics).items() if member.metrics else ():
            self._environment[key] = self._environment.get(key, 0.0) + value
        self._failed += member.dropped is DropReason.FAILED

    def _count_ages(self, member: Trajectory) -> None:
        for span in member.spans:
            if span.version is not None:  # a generated one
                age, tokens = self._version - span.version, len(span.tokens)
                if self._masked and age > self._max_staleness:
                    self._masked_tokens += tokens
                else:
                    self._span_ages[age] += 1
                    self._token_ages[age] += tokens

    def metrics(self) -> dict[str, float]:
        """The metrics of the groups added so far."""
        groups, members = len(self._group_seconds), len(self._lengths)
        return {
            "reward/mean": _ratio(sum(self._rewards), len(self._rewards)),
            "reward/std": float(np.std(self._rewards)) if self._rewards else 0.0,
            **self._age_metrics(),
            "train/generated_tokens": float(sum(self._lengths)),
            "length/generated_p50": percentile(Counter(self._lengths), 50),
            "length/generated_p99": percentile(Counter(self._lengths), 99),
            **{f"truncated/{cause}": _ratio(self._truncated[cause], members) for cause in TruncationCause},
            **rollout_metrics(self._environment, members),
            "groups/mean_wait_seconds": _ratio(sum(self._group_seconds), groups),
            "groups/deadline_frac": _ratio(self._closed, groups),
            "groups/failed_members": float(self._failed),
        }

    def _age_metrics(self) -> dict[str, float]:
        tokens = self._token_ages
        older = sum(count for age, count in tokens.items() if age > self._max_staleness)
        return {
            "staleness/span_age_p50": percentile(self._span_ages, 50),
            "staleness/span_age_p99": percentile(self._span_ages, 99),
            "staleness/span_age_max": float(max(self._span_ages, default=0)),
            "staleness/token_age_mean": _ratio(sum(age * count for age, count in tokens.items()), tokens.total()),
            **{f"staleness/age_tokens/{age}": float(tokens[age]) for age in range(self._max_staleness + 1)},
            "staleness/age_tokens/older": float(older),
            "staleness/frac_masked": _ratio(self._masked_tokens, self._masked_tokens + tokens.total()),
        }


def rollout_metrics(sums: Mapping[str, float], members: int) -> dict[str, float]:
    """``rollout/<key>``, what environments and tools reported as a sum over ``members``, and the mean beside it.

    A member that did not report a key counts as 0. Sums win if an environment has a key that ends with ``_mean`` too.
    """
    means = {f"rollout/{key}_mean": _ratio(value, members) for key, value in sums.items()}
    # A sum of finite numbers may be infinite, and then it is no number any more.
    return {key: metric(value) for key, value in (means | {f"rollout/{key}": sums[key] for key in sums}).items()}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def percentile(counts: Counter[int], percent: int) -> float:
    """The smallest value that at least ``percent`` of all do not exceed; 0 if there is none."""
    passed = 0
    for value in sorted(counts):
        passed += counts[value]
        if 100 * passed >= percent * counts.total():
            return float(value)
    return 0.0
