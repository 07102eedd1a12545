"""The values that flow through asyncrl: spans, segments, trajectories, groups and steps.

Tokens are the truth and messages only a view of them. A generated token keeps the id and the log-probability
that the server sent, and the policy version that sampled it; nothing here re-tokenises, pads or invents.

Segments and spans are values too, though not frozen: they are made for every request, and freezing triples that cost.

Suffixes for ragged lists and arrays: ``_G`` members of a group, ``_B`` sequences, ``_T`` tokens, ``_V`` vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.errors import InvalidValue
from asyncrl.plain import metric, shown

__all__ = [
    "BarrierWait",
    "DropReason",
    "Group",
    "Message",
    "Row",
    "Segment",
    "Span",
    "SpanKind",
    "Step",
    "StopReason",
    "ToolCall",
    "Trajectory",
    "TruncationCause",
    "VersionSpan",
]

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
Row: TypeAlias = Any
"""One dataset item: whatever the environment's ``reset`` understands."""
Message: TypeAlias = dict[str, Any]
"""A chat message: ``role`` and ``content``, for a tool's reply also ``name`` and ``tool_call_id``."""


class SpanKind(StrEnum):
    """What a run of tokens in a trajectory is."""

    PROMPT = "prompt"
    """The opening of the conversation, rendered from ``reset``'s messages."""
    GENERATED = "generated"
    """Sampled by the policy: the only kind that is trained."""
    FRAMING = "framing"
    """Written by the environment between two turns: tool results, role markers, a missing terminator."""


_GENERATED = SpanKind.GENERATED
# A name of its own, because to look it up in its class takes longer than what is done with it.


class StopReason(StrEnum):
    """Why the sampler ended a segment."""

    STOP = "stop"
    """A stop token or string: the turn is complete."""
    LENGTH = "length"
    """The requested number of tokens: the turn goes on with another segment if budget is left."""
    ABORT = "abort"
    """Ended from outside; what was sampled is kept, and the turn goes on from there."""


class TruncationCause(StrEnum):
    """Why a trajectory ended before its environment said so."""

    GENERATED_TOKENS = "generated_tokens"
    CONTEXT = "context"
    TURNS = "turns"
    EMPTY_SAMPLE = "empty_sample"
    GROUP_DEADLINE = "group_deadline"
    """Enough members of its group were done, and it wanted more tokens than stragglers may have."""


class DropReason(StrEnum):
    """Why a member or a group was not trained."""

    FAILED = "failed"
    """The member raised, timed out or lost its infrastructure; its ``error`` says how."""
    TRUNCATED = "truncated"
    """The truncation policy excludes this cause from training."""
    STRAGGLER = "straggler"
    """Its group's deadline passed, and stragglers are discarded or it had not begun."""
    RUN_ENDED = "run_ended"
    """The run ended while the group was outstanding."""


@dataclass(slots=True, kw_only=True)
class VersionSpan:
    """Tokens ``start <= i < end`` of a segment were sampled by policy ``version``."""

    version: int
    start: int
    end: int


@dataclass(slots=True, kw_only=True, eq=False)
class Segment:
    """What one sampling request returned.

    Example: ids ``[7, 9]`` with log-probabilities ``[-0.1, -2.3]``, both by version 4, ended by the stop token 9::

        Segment(tokens=ids([7, 9]), logprobs=floats([-0.1, -2.3]),
                versions=(VersionSpan(version=4, start=0, end=2),), stop=StopReason.STOP)
    """

    tokens: IntArray
    """(T,) as served, the stop token included."""
    logprobs: FloatArray
    """(T,) log-probability of each token at the sampling temperature, as served."""
    versions: tuple[VersionSpan, ...]
    """Covers ``0..T`` without gaps; empty only if T is 0."""
    stop: StopReason
    cached_tokens: int = 0
    """Prompt tokens whose KV the server reused."""
    server: str = ""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"segment has {len(self.tokens)} tokens and {len(self.logprobs)} log-probabilities")
        position = 0
        for span in self.versions:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"version spans {self.versions} leave a gap in {len(self.tokens)} tokens")
            position = span.end
        if position != len(self.tokens):
            raise ValueError(f"version spans {self.versions} do not cover {len(self.tokens)} tokens")

    def cut(self, tokens: int) -> Segment:
        """Its first ``tokens``, as a segment that completes its turn."""
        versions = tuple(
            VersionSpan(version=span.version, start=span.start, end=min(span.end, tokens))
            for span in self.versions
            if span.start < tokens
        )
        ids, logprobs = self.tokens[:tokens], self.logprobs[:tokens]
        return replace(self, tokens=ids, logprobs=logprobs, versions=versions, stop=StopReason.STOP)

    @property
    def oldest_version(self) -> int:
        """Of its tokens, of which there is at least one."""
        return self.versions[0].version if len(self.versions) == 1 else min(span.version for span in self.versions)


@dataclass(slots=True, kw_only=True, eq=False)
class Span:
    """A run of tokens of one kind and, if generated, of one policy version."""

    kind: SpanKind
    tokens: IntArray
    """(T,)"""
    logprobs: FloatArray | None = None
    """(T,) for generated spans, else None: nothing else has one."""
    version: int | None = None
    """The policy that sampled the tokens; None unless generated."""

    def __post_init__(self) -> None:
        generated = self.kind is _GENERATED
        if (self.logprobs is not None) is not generated or (self.version is not None) is not generated:
            raise ValueError(f"a {self.kind} span needs log-probabilities and a version exactly if it is generated")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model wrote. ``arguments`` is None if they could not be parsed; ``error`` says why."""

    name: str
    arguments: Mapping[str, Any] | None
    id: str = ""
    error: str = ""


_TOKENS = attrgetter("tokens")


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """One conversation from reset to reward; changed only by the task that runs it, but for ``dropped``.

    Everything the task needs to go on stands here, so that it can be stopped at any await and started again.
    """

    id: str
    group: int
    """Admission order of its group."""
    member: int
    row: Row
    seed: int
    """From 0 to 2**31 - 1, its own; for whatever its environment draws. Each request has another."""
    attempt: int = 1
    """How often this member was begun; earlier attempts failed, or their group was rolled out anew."""
    messages: list[Message] = field(default_factory=list)
    """A view for environments: changing it does not change the tokens."""
    spans: list[Span] = field(default_factory=list)
    """Append-only; concatenated they are exactly what the server saw and said."""
    turns: int = 0
    """Complete model messages."""
    turn_tokens: int = 0
    """Tokens generated in the turn that is not complete yet."""
    generated_tokens: int = 0
    context_tokens: int = 0
    segments: int = 0
    """Sampling requests answered."""
    empty_aborts: int = 0
    """Requests in a row that were aborted without a token."""
    version: int | None = None
    """The policy version of the newest segment; with trajectory sampling that of all of them."""
    anchor: int | None = None
    """The version whose weights computed the prefix KV that the next segment may reuse (``scheduling/versions.py``)."""
    stop: StopReason | None = None
    """How the last segment ended."""
    server: str = ""
    """Where it was sampled."""
    awaiting_reply: bool = False
    """The turn is complete and the environment has not answered it yet."""
    turn_cap: int | None = None
    """The environment's own bound on the tokens of the current turn."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls in the last complete turn."""
    tool_failures: list[tuple[str, str, str]] = field(default_factory=list)
    """Calls of tools that raised, which the model has read: name, error, and the user's line."""
    cut: bool = False
    """The last message is of a turn that was cut off: what stands there is how far it came, and no call in it was run.
    """
    over: bool = False
    """The environment ended the conversation: what is left is the reward."""
    env_state: bytes | None = None
    """JSON of what ``Env.snapshot`` said after the environment's last answer, where it is asked for that."""
    truncated: TruncationCause | None = None
    reward: float | None = None
    """Set once, at the end; None for a member that failed."""
    error: BaseException | None = None
    dropped: DropReason | None = None
    """Why it is not trained: set by its group, or by the trainer step if ``Truncation`` drops it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Per-trajectory numbers; environments may add theirs. Summed into ``rollout/<key>``."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went: ``queue``, ``sampling``, ``tool <name>``, ``environment`` (rest of a turn), ``reward``."""

    @property
    def final_text(self) -> str:
        """Text of the last model message, as far as it came if it was cut off; empty if the model said nothing."""
        if self.spans and not self.generated_tokens:
            return ""  # a message of the assistant in the prompt is not the model's
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return str(message.get("content") or "")
        return ""

    def append(self, span: Span) -> None:
        """Add the next tokens of the conversation."""
        tokens = len(span.tokens)
        if not tokens:
            return
        self.spans.append(span)
        self.context_tokens += tokens
        if span.kind is _GENERATED:
            self.generated_tokens += tokens
            self.turn_tokens += tokens

    def append_segment(self, segment: Segment) -> None:
        """Add what a sampling request returned, one generated span for each policy version in it."""
        tokens, logprobs = segment.tokens, segment.logprobs
        several = len(segment.versions) > 1
        for part in segment.versions:
            if several:
                tokens, logprobs = segment.tokens[part.start : part.end], segment.logprobs[part.start : part.end]
            self.append(Span(kind=_GENERATED, tokens=tokens, logprobs=logprobs, version=part.version))
        self.segments += 1
        self.stop = segment.stop
        self.server = segment.server

    def tokens(self) -> IntArray:
        """(context_tokens,) the whole conversation."""
        if len(self.spans) == 1:
            return self.spans[0].tokens
        if not self.spans:
            return np.empty(0, dtype=np.int32)
        return np.concatenate(list(map(_TOKENS, self.spans)))

    def turn_ids(self) -> IntArray:
        """(turn_tokens,) the ids generated in the current turn, over all of its segments."""
        if self.spans and len(self.spans[-1].tokens) == self.turn_tokens:
            return self.spans[-1].tokens  # a turn of one segment, as most are
        return self.tokens()[self.context_tokens - self.turn_tokens :]

    def add_metric(self, key: str, value: float) -> None:
        """Add ``value`` to ``metrics[key]``. Raises ``InvalidValue`` if it is not a number."""
        try:
            self.metrics[key] = self.metrics.get(key, 0.0) + metric(value)
        except TypeError as error:
            caller = sys._getframe(1)
            where = f"{caller.f_code.co_qualname} ({caller.f_code.co_filename}:{caller.f_lineno})"
            raise InvalidValue(f"metric {shown(key)} must be a number, but {error}: {where}") from None

    def add_seconds(self, what: str, seconds: float) -> None:
        """Add to the time spent in ``what``."""
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    @property
    def is_trained(self) -> bool:
        """True of a finished one whose tokens are trained, if they are young enough; its advantage may still be 0."""
        return self.dropped is None and self.reward is not None

    @property
    def slowest(self) -> str:
        """What took the most of its time; empty before anything did."""
        return max(self.seconds, key=lambda what: (self.seconds[what], what), default="")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one row: the unit of admission, baseline and batch.

    All of them, unless stragglers are discarded, or carried over: then it is the part that is ready.
    """

    index: int
    """Admission order in the run."""
    row: Row
    members_G: Sequence[Trajectory]
    seconds: float
    """From the first dispatch to the last member's end."""
    closed_by_deadline: bool = False
    final: bool = True
    """False if members of the same group follow."""
    last_member: int = 0
    """The one that ended last."""

    @property
    def context_tokens(self) -> int:
        """Tokens of all members, prompts included."""
        return sum(member.context_tokens for member in self.members_G)


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierWait:
    """Enough groups were ready for a batch, but the commit waited ``seconds`` for ``group``: it was the last one due.

    ``member`` ended last in it and spent most of its time in ``doing``: ``sampling``, ``tool search``, ..
    """

    seconds: float
    group: int
    member: int
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What one trainer step did.

    ``n`` counts batches consumed from 1; ``model_step`` is the committed version after it, which stays the same if the
    batch had no gradient.
    """

    n: int
    model_step: int
    metrics: Mapping[str, float]
    trajectories: Sequence[Trajectory]
    waits: Sequence[BarrierWait] = ()
    """For whom the trainer waited at the barrier."""
    versions: Sequence[int] = ()
    """Those that it made, one for each update; the last of them is published."""
