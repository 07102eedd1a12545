"""What users say about the schedule: small frozen objects with the rule as a method. No clock, no I/O, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from asyncrl.errors import ConfigError
from asyncrl.types import TruncationCause

__all__ = [
    "BatchOrder",
    "ForwardBackwardBatch",
    "GroupCompletion",
    "KVCache",
    "SamplingPolicy",
    "Schedule",
    "StalePolicy",
    "Truncation",
    "TruncationPolicy",
    "require_choice",
    "require_count",
]

StalePolicy: TypeAlias = Literal["wait", "mask_span", "keep"]
SamplingPolicy: TypeAlias = Literal["trajectory", "segment"]
BatchOrder: TypeAlias = Literal["completion", "admission"]
TruncationPolicy: TypeAlias = Literal["zero_reward", "reward", "drop", "drop_and_exclude_from_baseline"]


def require_count(key: str, value: object, *, least: int) -> None:
    """Refuse anything but an integer of at least ``least``; True is not an integer here."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError.for_value(key, value, f"an integer of at least {least}")


def require_choice(key: str, value: object, choices: object) -> None:
    """Refuse a value that the ``Literal`` type ``choices`` does not list."""
    known = get_args(choices)
    if value not in known:
        raise ConfigError.for_value(key, value, "one of " + ", ".join(map(repr, known)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How much is in flight, and how far sampling may work ahead (DESIGN.md 4.3, 4.4)."""

    concurrency: int = 256
    """Active trajectories, the time in tools included."""
    max_sample_requests: int | None = None
    """Outstanding sampling requests; None: as many as trajectories."""
    admit_ahead: int = 2
    """Future batches whose groups may be admitted; never more than ``max_staleness``."""
    oversample_factor: float = 1.0
    """Admit this many times the groups of the admitted batches, to have a choice; surplus stays eligible."""

    def __post_init__(self) -> None:
        require_count("schedule.concurrency", self.concurrency, least=1)
        if self.max_sample_requests is not None:
            require_count("schedule.max_sample_requests", self.max_sample_requests, least=1)
        require_count("schedule.admit_ahead", self.admit_ahead, least=0)
        if not (isinstance(self.oversample_factor, int | float) and 1.0 <= self.oversample_factor < math.inf):
            raise ConfigError.for_value("schedule.oversample_factor", self.oversample_factor, "a number of at least 1")

    @property
    def sample_requests(self) -> int:
        """The bound on outstanding sampling requests."""
        return self.concurrency if self.max_sample_requests is None else self.max_sample_requests

    def slots(self, *, groups_per_step: int, max_staleness: int) -> int:
        """Groups that may hold a slot at once.

        With 8 groups a step, a bound of 2 and the defaults: min(3 * 8, ceil(3 * 8 * 1.0)) = 24.
        """
        batches = 1 + min(self.admit_ahead, max_staleness)
        wanted = math.ceil(batches * groups_per_step * self.oversample_factor)
        return min((1 + max_staleness) * groups_per_step, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCompletion:
    """When a group is complete: ``wait`` for all of its members."""

    mode: Literal["wait"] = "wait"
    min_members: int = 2
    """Members with a reward that a group needs for a baseline of its own."""

    def __post_init__(self) -> None:
        require_choice("completion.mode", self.mode, Literal["wait"])
        require_count("completion.min_members", self.min_members, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What a truncated trajectory counts for, by cause.

    ``zero_reward``: trained, with reward 0. ``reward``: trained, with what ``on_truncated`` says. ``drop``: in the
    baseline with what ``on_truncated`` says, but not trained. ``drop_and_exclude_from_baseline``: neither.
    """

    train: TruncationPolicy = "zero_reward"
    by_cause: Mapping[str, TruncationPolicy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("truncation.train", self.train, TruncationPolicy)
        causes = [cause.value for cause in TruncationCause]
        for cause, rule in self.by_cause.items():
            if cause not in causes:
                raise ConfigError.for_unknown_key(cause, causes, where="truncation.by_cause")
            require_choice(f"truncation.by_cause.{cause}", rule, TruncationPolicy)

    def policy(self, cause: TruncationCause) -> TruncationPolicy:
        """The rule for ``cause``."""
        return self.by_cause.get(cause.value, self.train)

    @property
    def loses_trajectories(self) -> bool:
        """True if some cause is not trained."""
        return any(rule.startswith("drop") for rule in (self.train, *self.by_cause.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """What happens to a trajectory's prefix KV when ``sampling_policy="segment"`` moves it to newer weights.

    Each version has its own prefix-cache namespace, so a move costs a full prefill of the context: ``refill``, which
    must be acknowledged with ``allow_reprefill=True``.
    """

    on_limit: Literal["refill"] = "refill"
    allow_reprefill: bool = False

    def __post_init__(self) -> None:
        require_choice("kv_cache.on_limit", self.on_limit, Literal["refill"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardBatch:
    """Send finished groups to forward-backward early, when either threshold is reached (synchronous runs only)."""

    min_sequences: int = 64
    min_tokens: int = 131_072
    """Full input tokens, prompts included."""

    def __post_init__(self) -> None:
        require_count("forward_backward_batch.min_sequences", self.min_sequences, least=1)
        require_count("forward_backward_batch.min_tokens", self.min_tokens, least=1)

    def reached(self, *, sequences: int, tokens: int) -> bool:
        """True if what is ready is worth a forward-backward pass."""
        return sequences >= self.min_sequences or tokens >= self.min_tokens
