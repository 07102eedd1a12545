"""The numbers of a trainer step: what its batch was, and what happened since the step before.

``batch_metrics`` is a pure function of the batch. ``MetricsRecorder`` sums events between two steps; work for later
batches counts too, because it is what the machines did in that time. Every key is in every step, zero if nothing
happened; only ``rollout/<key>`` follows the environment. Left out, because only their owners know them: ``loss/*``,
``optimizer/*`` and ``train/active_groups``, which the trainer adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.events import (
    BarrierOpened,
    BatchTaken,
    ChunkTrained,
    Event,
    LearnerStepped,
    SegmentSampled,
    VersionCommitted,
    VersionPublished,
)
from asyncrl.types import DropReason, Group, SpanKind, Trajectory, TruncationCause

__all__ = ["MetricsRecorder", "batch_metrics"]

_SUMMED = (
    "sampling/requests",
    "sampling/generated_tokens",
    "sampling/prompt_tokens",
    "sampling/cached_prompt_tokens",
    "sampling/queue_seconds",
    "sampling/request_seconds",
    "staleness/wait_seconds",
    "staleness/wait_count",
    "train/active_sequences",
    "train/active_tokens",
    "train/backward_chunks",
    "train/forward_backward_seconds",
    "train/optimizer_seconds",
    "train/publication_seconds",
    "train/updated",
)


class MetricsRecorder:
    """Owns the sums since the last step. Subscribe ``observe``; ``started`` is the loop time now."""

    def __init__(self, *, started: float) -> None:
        self._since = started
        self._batch_taken: float | None = None
        self._sums = dict.fromkeys(_SUMMED, 0.0)

    def observe(self, event: Event) -> None:
        """Count ``event``."""
        match event:
            case SegmentSampled():
                self._count_segment(event)
            case BarrierOpened():
                self._add("staleness/wait_seconds", event.seconds)
                self._add("staleness/wait_count", 1)
            case BatchTaken() if self._batch_taken is None:
                self._batch_taken = event.time
            case ChunkTrained():
                self._add("train/backward_chunks", 1)
                self._add("train/active_sequences", event.sequences)
                self._add("train/active_tokens", event.tokens)
                self._add("train/forward_backward_seconds", event.seconds)
            case LearnerStepped():
                self._add("train/optimizer_seconds", event.seconds)
            case VersionCommitted():
                self._add("train/updated", 1)
            case VersionPublished():
                self._add("train/publication_seconds", event.seconds)

    def take(self, now: float, *, reserved_groups: int = 0, inflight_requests: int = 0) -> dict[str, float]:
        """The metrics of the interval that ends ``now`` (loop time), and start the next one.

        ``reserved_groups``: admitted groups that no batch has taken. ``inflight_requests``: sampling requests under
        way. Both are read at this moment by whoever owns them.
        """
        metrics = self._sums
        seconds = now - self._since
        metrics["sampling/interval_seconds"] = seconds
        metrics["sampling/generated_tokens_per_second"] = _ratio(metrics["sampling/generated_tokens"], seconds)
        metrics["sampling/cached_prompt_fraction"] = _ratio(
            metrics["sampling/cached_prompt_tokens"], metrics["sampling/prompt_tokens"]
        )
        metrics["sampling/inflight_requests"] = float(inflight_requests)
        metrics["staleness/reserved_groups"] = float(reserved_groups)
        metrics["train/batch_seconds"] = 0.0 if self._batch_taken is None else now - self._batch_taken
        self._since = now
        self._batch_taken = None
        self._sums = dict.fromkeys(_SUMMED, 0.0)
        return metrics

    def _count_segment(self, event: SegmentSampled) -> None:
        self._add("sampling/requests", 1)
        self._add("sampling/generated_tokens", event.tokens)
        self._add("sampling/prompt_tokens", event.prompt_tokens)
        self._add("sampling/cached_prompt_tokens", event.cached_tokens)
        self._add("sampling/queue_seconds", event.queue_seconds)
        self._add("sampling/request_seconds", event.seconds)

    def _add(self, key: str, value: float) -> None:
        self._sums[key] += value


def batch_metrics(groups: Sequence[Group], *, version: int, max_staleness: int | None) -> dict[str, float]:
    """The metrics of a batch that is trained while ``version`` is committed.

    Ages are in versions, one per generated span whatever its length; ``max_staleness`` is the bound above which tokens
    are masked, None if none is. Percentiles are values that occur. Rewards are the raw ones, before any truncation
    rule; a group counts as without variance if all of its rewards are equal.
    """
    members = [member for group in groups for member in group.members_G]
    failed = sum(member.dropped is DropReason.FAILED for member in members)
    return {
        **_reward_metrics(groups),
        **_age_metrics(members, version, max_staleness),
        **_length_metrics(members),
        **_environment_metrics(members),
        "groups/mean_wait_seconds": _mean([group.seconds for group in groups]),
        "groups/failed_members": float(failed),
    }


def _reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    rewards_G = [[member.reward for member in group.members_G if member.reward is not None] for group in groups]
    rewards = [reward for group in rewards_G for reward in group]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": float(np.std(rewards)) if rewards else 0.0,
        "reward/zero_variance_group_frac": _mean([len(set(group)) <= 1 for group in rewards_G]),
    }


def _age_metrics(members: Sequence[Trajectory], version: int, max_staleness: int | None) -> dict[str, float]:
    spans = [span for member in members for span in member.spans if span.kind is SpanKind.GENERATED]
    aged = [(version - span.version, len(span.tokens)) for span in spans if span.version is not None]
    ages = [age for age, _ in aged]
    masked = 0 if max_staleness is None else sum(tokens for age, tokens in aged if age > max_staleness)
    return {
        "staleness/span_age_p50": _percentile(ages, 50),
        "staleness/span_age_p99": _percentile(ages, 99),
        "staleness/span_age_max": float(max(ages, default=0)),
        "staleness/frac_masked": _ratio(masked, sum(tokens for _, tokens in aged)),
    }


def _length_metrics(members: Sequence[Trajectory]) -> dict[str, float]:
    lengths = [member.generated_tokens for member in members]
    return {
        "train/generated_tokens": float(sum(lengths)),
        "length/generated_p50": _percentile(lengths, 50),
        "length/generated_p99": _percentile(lengths, 99),
    }


def _environment_metrics(members: Sequence[Trajectory]) -> dict[str, float]:
    metrics = {
        f"truncated/{cause}": _mean([member.truncated is cause for member in members]) for cause in TruncationCause
    }
    for member in members:
        for key, value in member.metrics.items():
            metrics[f"rollout/{key}"] = metrics.get(f"rollout/{key}", 0.0) + value
    return metrics


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percentile(values: Sequence[int], percent: float) -> float:
    return float(np.percentile(values, percent, method="inverted_cdf")) if values else 0.0
