"""What users say about the schedule: small frozen objects with the rule as a method. No clock, no I/O, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from asyncrl.errors import ConfigError, require_choice, require_count
from asyncrl.scheduling.staleness import batches_ahead
from asyncrl.types import TruncationCause

__all__ = [
    "STALE_RULES",
    "BatchOrder",
    "ForwardBackwardBatch",
    "GroupCompletion",
    "KVCache",
    "SamplingPolicy",
    "Schedule",
    "StalePolicy",
    "StaleRule",
    "Stragglers",
    "Truncation",
    "TruncationPolicy",
]

StalePolicy: TypeAlias = Literal["wait", "mask_span", "keep"]
SamplingPolicy: TypeAlias = Literal["trajectory", "segment"]
Stragglers: TypeAlias = Literal["truncate", "carry_over", "discard"]
BatchOrder: TypeAlias = Literal["completion", "admission"]
TruncationPolicy: TypeAlias = Literal["zero_reward", "reward", "drop", "drop_and_exclude_from_baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleRule:
    """What a ``stale_policy`` does about spans older than ``max_staleness``; by default it trains them as any other."""

    bounded: bool = False
    """A barrier on the commit sees to it that there are none."""
    masked: bool = False
    """They get no gradient."""
    notice: str = ""
    """Name of the warning at a run's start, if something can be lost."""
    reason: str = ""
    """What can be lost, for that warning."""

    @property
    def unbounded(self) -> bool:
        """True if tokens of any age are trained."""
        return not (self.bounded or self.masked)


STALE_RULES: Mapping[StalePolicy, StaleRule] = {
    "wait": StaleRule(bounded=True),
    "mask_span": StaleRule(
        masked=True,
        notice="old_spans_masked",
        reason="stale_policy='mask_span' gives spans older than max_staleness no gradient; most are of slow "
        "trajectories",
    ),
    "keep": StaleRule(
        notice="staleness_not_bounded",
        reason="stale_policy='keep' measures the age of trained tokens but has no bound on it",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How much is in flight, and how far sampling may work ahead."""

    concurrency: int = 256
    """Active trajectories, the time in tools included."""
    max_sample_requests: int | None = None
    """Outstanding sampling requests; None: as many as trajectories."""
    admit_ahead: int = 2
    """Future batches whose groups may be admitted; never more than ``max_staleness``, and where a batch makes several
    versions, than the bound has room for."""
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

    def slots(self, *, groups_per_step: int, max_staleness: int, updates: int = 1) -> int:
        """Groups that may hold a slot at once, if each batch makes up to ``updates`` versions.

        With 8 groups a step, a bound of 2 and the defaults: min(3 * 8, ceil(3 * 8 * 1.0)) = 24. With 2 updates a batch
        and a bound of 3, one batch may be ahead: 16.
        """
        ahead = batches_ahead(max_staleness, updates)
        batches = 1 + min(self.admit_ahead, ahead)
        wanted = math.ceil(batches * groups_per_step * self.oversample_factor)
        return min((1 + ahead) * groups_per_step, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCompletion:
    """When a group is complete: ``wait`` for all of its members, or ``deadline``.

    A deadline counts tokens, never seconds. Once ``min_members`` have their reward, each of the others may sample
    ``max_straggler_tokens`` more. The first that wants more than that ends the waiting for all of them::

        GroupCompletion(mode="deadline", min_members=6, max_straggler_tokens=2048, on_stragglers="truncate")

    A member in a long tool call wants no tokens, and the deadline never fires for it alone. Tokens are counted when a
    request is answered: one that was under way when the quorum was reached may bring up to ``Budget.segment_tokens``.
    """

    mode: Literal["wait", "deadline"] = "wait"
    """``wait``: for all members. ``deadline``: the slowest may sample only so much once ``min_members`` are done."""
    min_members: int = 2
    """Members with a reward that a group needs for a baseline of its own, and for the quorum of a deadline."""
    max_straggler_tokens: int | None = None
    """Required with ``deadline``; 0 lets no member begin another request after the quorum."""
    on_stragglers: Stragglers = "truncate"
    """``truncate``: they end where they are, with the cause ``group_deadline``. ``discard``: they are thrown away.
    ``carry_over``: the finished members are ready now, the others go on and follow later (needs ``Batchwise``)."""

    def __post_init__(self) -> None:
        require_choice("completion.mode", self.mode, Literal["wait", "deadline"])
        require_count("completion.min_members", self.min_members, least=1)
        require_choice("completion.on_stragglers", self.on_stragglers, Stragglers)
        if self.mode == "deadline":
            require_count("completion.max_straggler_tokens", self.max_straggler_tokens, least=0)
        elif self.max_straggler_tokens is not None:
            allowed = "left out unless completion.mode='deadline'"
            raise ConfigError.for_value("completion.max_straggler_tokens", self.max_straggler_tokens, allowed)

    @property
    def stragglers(self) -> Stragglers | None:
        """What happens to members past the deadline; None without one."""
        return self.on_stragglers if self.mode == "deadline" else None

    @property
    def whole_groups(self) -> bool:
        """True if a group is always ready with all of its members at once, as the barrier needs it."""
        return self.stragglers in (None, "truncate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What a truncated trajectory counts for, by cause.

    ``zero_reward``: trained, with reward 0. ``reward``: trained, with what ``on_truncated`` says. ``drop``: in the
    baseline with what ``on_truncated`` says, but not trained. ``drop_and_exclude_from_baseline``: neither.
    """

    train: TruncationPolicy = "zero_reward"
    """For every cause: ``zero_reward`` trains it with reward 0, ``reward`` with what ``on_truncated`` returns;
    ``drop`` only compares others with it, ``drop_and_exclude_from_baseline`` does neither."""
    by_cause: Mapping[str, TruncationPolicy] = field(default_factory=dict)
    """The same for single causes, which are the names of the metrics ``truncated/<cause>``."""

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
    """How old a conversation's prefix KV may be when ``sampling_policy="segment"`` moves it to newer weights.

    Age: the version that samples minus the version whose weights computed the prefix. Within ``max_staleness`` a
    trajectory follows the newest published version and keeps its prefix. At the limit ``hold`` keeps sampling with the
    version that it has; ``refill`` moves on and computes the whole prefix again, which must be acknowledged with
    ``allow_reprefill=True``. ``versions.py`` is the rule.
    """

    max_staleness: int = 0
    """Versions that the cached prefix may be older than the weights that sample; 0 never reuses older KV."""
    on_limit: Literal["hold", "refill"] = "hold"
    """Beyond that: ``hold`` stays with the older weights, ``refill`` computes the prefix again (needs
    ``allow_reprefill``)."""
    allow_reprefill: bool = False
    """Acknowledge that refilling costs the prefix's tokens once more."""

    def __post_init__(self) -> None:
        require_count("kv_cache.max_staleness", self.max_staleness, least=0)
        require_choice("kv_cache.on_limit", self.on_limit, Literal["hold", "refill"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardBatch:
    """Send finished groups to forward-backward early, when either threshold is reached (synchronous runs only)."""

    min_sequences: int = 64
    """Trajectories that are worth a pass of their own."""
    min_tokens: int = 131_072
    """Full input tokens, prompts included."""

    def __post_init__(self) -> None:
        require_count("forward_backward_batch.min_sequences", self.min_sequences, least=1)
        require_count("forward_backward_batch.min_tokens", self.min_tokens, least=1)

    def reached(self, *, sequences: int, tokens: int) -> bool:
        """True if what is ready is worth a forward-backward pass."""
        return sequences >= self.min_sequences or tokens >= self.min_tokens
