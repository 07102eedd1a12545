"""How long a sampling request may take, from what its server really did: the rule, without any waiting.

Nobody can tell a server that hangs from one that is slow by the first minutes. So a request is given several times what
the server took for others, and several times that again while the server's own report of its load counts the request.
Time in which the server was held counts for neither side (``HoldClock``): while weights are changed, or it is paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncrl.sampling.replies import Load

__all__ = ["LEAST_S", "Evidence", "HoldClock", "Pace", "allowed_s", "evidence", "work_of"]

LEAST_S = 120.0
"""No request is ended sooner: a compilation, a garbage collection or a file that loads must not look like a hang."""

_PROMPT_SHARE = 16
# Tokens of a prompt are computed together; this many cost at most what one sampled token does.
_MARGIN = 3.0
_COUNTED_MARGIN = 4.0
_UNKNOWN_S = 600.0
_UNKNOWN_PACE_S = 1.0
# Of a server that answered nothing yet: slower than any that somebody would train with.
_KEPT = 0.98
# Of what was seen, after each further answer: some fifty answers later a server's past is forgotten.


def work_of(prompt_tokens: int, new_tokens: int) -> float:
    """What a request costs a server, in sampled tokens."""
    return new_tokens + prompt_tokens / _PROMPT_SHARE


class Pace:
    """How fast one server answers, from requests that it finished; newer ones count for more."""

    __slots__ = ("_seconds", "_work", "slowest_s")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._work = 0.0
        self.slowest_s = 0.0
        """The longest time of a request; shrinks with each that was faster."""

    def saw(self, seconds: float, work: float) -> None:
        """A request of ``work`` was answered after ``seconds``."""
        self._seconds = self._seconds * _KEPT + seconds
        self._work = self._work * _KEPT + work
        self.slowest_s = max(self.slowest_s * _KEPT, seconds)

    @property
    def seconds_per_token(self) -> float | None:
        """On average; None if nothing was answered yet."""
        return self._seconds / self._work if self._work else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a server's report of its load says about requests that are late."""

    counted: bool
    """They may well be under way: it counts as many as we wait for, and tokens come; or there is no report."""
    seconds_per_token: float | None = None
    """The pace of what runs now, if the report tells."""


def evidence(load: Load | None, ours: int) -> Evidence:
    """What ``load`` says about ``ours`` requests; None if this server does not tell its load."""
    if load is None:
        return Evidence(counted=True)
    stuck = load.running > 0 and load.tokens_per_second == 0
    counted = load.running + load.waiting >= ours and not stuck
    return Evidence(counted=counted, seconds_per_token=load.seconds_per_token)


def allowed_s(work: float, pace: Pace, found: Evidence | None = None) -> float:
    """The longest that a request of ``work`` may take on a server of this ``pace``; finite, whatever is known.

    ``found``: None gives the time after which somebody has to look. 1,000 tokens on a server that took 50 s for such
    requests, and never more than 80 s: 120 + 3 * (80 + 50) = 510 s. If its load report counts the request: four times
    that. On a server that answered nothing yet: 600 + 1,000 s, and four times that.
    """
    known_s = pace.seconds_per_token
    told_s = None if found is None else found.seconds_per_token
    if known_s is None and told_s is None:
        allowed = _UNKNOWN_S + _UNKNOWN_PACE_S * work
    else:
        allowed = LEAST_S + _MARGIN * (pace.slowest_s + max(known_s or 0.0, told_s or 0.0) * work)
    return allowed * _COUNTED_MARGIN if found is not None and found.counted else allowed


class HoldClock:
    """Loop time less the time in which somebody held the server. Holds may overlap; none of them is counted twice.

    ``also``: a clock that stands still too whenever this one does.
    """

    def __init__(self, *, also: HoldClock | None = None) -> None:
        self._also = also
        self._holds = 0
        self._held_s = 0.0
        self._since = 0.0

    def now(self) -> float:
        """The time on this clock; only differences mean something."""
        return (_loop_time() if self._holds == 0 else self._since) - self._held_s

    def hold(self) -> None:
        """Stand still until ``let_go`` was called as often."""
        if self._holds == 0:
            self._since = _loop_time()
        self._holds += 1
        if self._also is not None:
            self._also.hold()

    def let_go(self) -> None:
        """Undo one ``hold``; without one, nothing happens."""
        if self._holds == 0:
            return
        self._holds -= 1
        if self._holds == 0:
            self._held_s += _loop_time() - self._since
        if self._also is not None:
            self._also.let_go()

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Stand still inside the block."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()


def _loop_time() -> float:
    # What anyio.current_time() says, for a tenth of its time: each request asks twice.
    return asyncio.get_running_loop().time()
