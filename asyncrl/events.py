"""Lifecycle events: the one stream that logs, metrics, the timeline and tests read.

What happened is reported once, as a typed value with the loop time at which it happened. Observers are plain
functions called at once, in order; they must be quick, must not raise and must not change what they are given. (Events
are not frozen: each segment brings several, and a frozen dataclass takes three times as long to make.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncrl.errors import ObserverError, StalenessError
from asyncrl.types import BarrierWait, Group

__all__ = [
    "BarrierOpened",
    "BatchTaken",
    "ChunkTrained",
    "DeadlinePassed",
    "EvaluationFinished",
    "Event",
    "Events",
    "GroupAdmitted",
    "GroupBorn",
    "GroupConsumed",
    "GroupDropped",
    "GroupFinished",
    "GroupRerolled",
    "LearnerStepped",
    "MemberDiscarded",
    "MemberFailed",
    "MemberFinished",
    "MemberResumed",
    "Notice",
    "RequestRepeated",
    "RolloutsFinished",
    "RunEnded",
    "SegmentSampled",
    "StepFinished",
    "ToolCalled",
    "ToolFailed",
    "Underway",
    "VersionCommitted",
    "VersionPublished",
]


@dataclass(slots=True, kw_only=True)
class Event:
    """Something happened at loop time ``time`` (seconds)."""

    time: float


@dataclass(slots=True, kw_only=True)
class GroupAdmitted(Event):
    """A group got its reservation; it has no age yet."""

    group: int


@dataclass(slots=True, kw_only=True)
class GroupBorn(Event):
    """A group's first segment was dispatched under ``version``; it must be trained by version ``due``."""

    group: int
    version: int
    due: int


@dataclass(slots=True, kw_only=True)
class SegmentSampled(Event):
    """A sampling request was answered."""

    group: int
    member: int
    version: int
    """Oldest version among its tokens."""
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    queue_seconds: float
    """From the wish to sample to the dispatch."""
    seconds: float
    """From the dispatch to the answer."""
    cut_tokens: int = 0
    """Of ``tokens``: sampled beyond a stop string that the server could not see, and not kept."""
    refilled: bool = False
    """The limit on KV age moved the trajectory to newer weights, and its whole prefix was computed again."""


@dataclass(slots=True, kw_only=True)
class RequestRepeated(Event):
    """A sampling request got no answer and is made again; each time counts."""

    url: str
    """Who is asked now."""
    cause: str
    """``stale_connection`` (the server had closed it), ``same_server``, ``other_server``, or ``late`` (no answer)."""


@dataclass(slots=True, kw_only=True)
class ToolCalled(Event):
    """A turn's environment call (its tools included) ended."""

    group: int
    member: int
    seconds: float
    calls: int
    errors: int


@dataclass(slots=True, kw_only=True)
class ToolFailed(Event):
    """A tool raised an ordinary error, which the model reads; its code may be wrong, or the model's arguments."""

    group: int
    member: int
    tool: str
    error: str
    where: str
    """File, line and function of the user's code."""


@dataclass(slots=True, kw_only=True)
class MemberFinished(Event):
    """A trajectory got its reward."""

    group: int
    member: int
    reward: float
    turns: int
    generated_tokens: int
    truncated: str


@dataclass(slots=True, kw_only=True)
class MemberFailed(Event):
    """An attempt at a trajectory ended without a reward; ``attempt`` counts from 1, rerolls of its group included."""

    group: int
    member: int
    attempt: int
    error: str
    where: str = ""
    """File, line and function of the user's code that raised; empty if none did."""
    generated_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class MemberResumed(Event):
    """A trajectory that an earlier process had begun: it goes on, or if it was not ``recovered``, begins again."""

    group: int
    member: int
    recovered: bool
    generated_tokens: int
    """Sampled before."""


@dataclass(slots=True, kw_only=True)
class DeadlinePassed(Event):
    """A member wanted more tokens than stragglers may have: ``finished`` members were done, ``stragglers`` were not."""

    group: int
    finished: int
    stragglers: int


@dataclass(slots=True, kw_only=True)
class MemberDiscarded(Event):
    """The group's deadline ended a trajectory that will not be trained."""

    group: int
    member: int
    generated_tokens: int


@dataclass(slots=True, kw_only=True)
class GroupFinished(Event):
    """All members of a group ended."""

    group: int
    seconds: float
    closed_by_deadline: bool = False


@dataclass(slots=True, kw_only=True)
class GroupRerolled(Event):
    """A member failed for good: all of its group starts afresh, and nothing of it is left."""

    group: int
    error: str
    where: str = ""
    """As of the member that failed."""
    generated_tokens: int = 0
    """Of members that had not failed."""


@dataclass(slots=True, kw_only=True)
class GroupDropped(Event):
    """A group will never be trained, and its slot is free; ``reason`` is a ``DropReason``."""

    group: int
    reason: str
    error: str = ""
    where: str = ""
    """As of the member that failed."""
    generated_tokens: int = 0
    """Of members that had not failed."""


@dataclass(slots=True, kw_only=True)
class GroupConsumed(Event):
    """A step is over that had this group in its batch, or these members of it if they are not the last."""

    n: int
    group: int
    trained: int
    """Members in the baseline and in the loss, whatever their advantage."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """``DropReason`` -> the other members."""
    final: bool = True
    """False if members of the same group follow."""


@dataclass(slots=True, kw_only=True)
class BarrierOpened(Event):
    """Enough groups were ready for a batch, but the trainer had to wait for one that was due."""

    wait: BarrierWait


@dataclass(slots=True, kw_only=True)
class BatchTaken(Event):
    """The trainer took these groups (or the first chunk of them) to train at ``version``."""

    n: int
    version: int
    groups: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class ChunkTrained(Event):
    """A forward-backward pass ended."""

    n: int
    sequences: int
    tokens: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class LearnerStepped(Event):
    """The optimizer step ended."""

    n: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class VersionCommitted(Event):
    """The learner's parameters are now policy ``version``."""

    version: int


@dataclass(slots=True, kw_only=True)
class VersionPublished(Event):
    """Every server holds policy ``version``."""

    version: int
    seconds: float
    probe_error: float
    """Largest absolute difference between the server's and the learner's log-probabilities of the probe prompt."""


@dataclass(slots=True, kw_only=True)
class RolloutsFinished(Event):
    """The trajectories of a step or of an evaluation, which nobody changes any more.

    Only observers that name this kind get it: others, such as files of events, would keep or write all of them.
    """

    n: int
    """The step, or the one that the evaluation follows (0: before the first)."""
    version: int
    """Committed while the step was trained, or measured."""
    groups: Sequence[Group] = field(repr=False)
    evaluation: str = ""
    """Name of the evaluation; empty for a step."""


@dataclass(slots=True, kw_only=True)
class EvaluationFinished(Event):
    """An evaluation of policy ``version`` ended."""

    version: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StepFinished(Event):
    """A trainer step ended."""

    n: int
    model_step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class RunEnded(Event):
    """The run of a command or of ``rl.run`` is over: the last event, unless the process was killed."""

    reason: str
    """``finished``, ``stopped`` (by a signal) or ``failed``."""
    error: str = ""
    where: str = ""
    """As of a member that failed."""


@dataclass(slots=True, kw_only=True)
class Notice(Event):
    """Something that a person should know; ``name`` is snake_case, the rest are keys."""

    name: str
    level: str = "info"
    keys: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Underway(Event):
    """The run has begun something that is no step, may take long, and has nothing else to tell."""

    what: str
    """In words: ``loading the model``."""
    done: int = 0
    total: int = 0
    """Of things that are counted, else 0."""


Observer: TypeAlias = Callable[[Event], None]


class Events:
    """Owns the list of observers and hands each event to all of them."""

    def __init__(self) -> None:
        self._observers: list[tuple[Observer, tuple[type[Event], ...]]] = []
        self._routes: dict[type[Event], tuple[Observer, ...]] = {}
        # Kind -> its observers, worked out at the first event of the kind.

    def subscribe(self, observer: Observer, *, kinds: tuple[type[Event], ...] = (Event,)) -> Callable[[], None]:
        """Call ``observer`` with each later event of these kinds; the returned function ends that.

        ``Event`` stands for all kinds but ``RolloutsFinished``.
        """
        entry = (observer, kinds)
        self._observers.append(entry)
        self._routes = {}

        def unsubscribe() -> None:
            self._observers.remove(entry)
            self._routes = {}

        return unsubscribe

    def wants(self, kind: type[Event]) -> bool:
        """True if somebody observes events of this kind; where there are many of them, the others need not be made."""
        observers = self._routes.get(kind)
        return bool(self._route(kind) if observers is None else observers)

    def emit(self, event: Event) -> None:
        """Hand ``event`` to every observer of its kind, in the order of their subscription.

        Raises ``ObserverError`` if one of them raises.
        """
        observers = self._routes.get(type(event))
        for observer in self._route(type(event)) if observers is None else observers:
            try:
                observer(event)
            except StalenessError:
                raise  # the run itself broke a promise, and this observer found it
            except Exception as error:
                raise ObserverError(f"{observer!r} raised {error!r} at {event}") from error

    def _route(self, kind: type[Event]) -> tuple[Observer, ...]:
        """Who observes events of this kind, when that is asked for the first time."""
        observers = tuple(
            observer
            for observer, kinds in self._observers
            if (kind in kinds if kind is RolloutsFinished else issubclass(kind, kinds))
        )
        self._routes[kind] = observers
        return observers
