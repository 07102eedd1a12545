"""Which server gets the next request.

``choose`` is the rule and ``Pool`` the state: who takes requests, and how many of ours each has. A server is in one of
three states. *Live* ones take requests. *Suspect* ones answered something odd: they get no new request until somebody
looked at them, but keep what they have. *Out* ones are known to be wrong: what they have is taken away from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum

import anyio

from asyncrl.scheduling.pulse import Pulse

__all__ = ["Pool", "ServerState", "choose", "rendezvous"]

_OVERLOAD = 1.25
_SLACK_REQUESTS = 4
# With few requests every server is "a quarter above the mean" now and then; that is no reason to lose a warm prefix.


def rendezvous(key: str, urls: Sequence[str]) -> str:
    """The server that ``key`` sticks to. When servers come or go, only the keys of those servers move."""
    return max(urls, key=lambda url: hashlib.blake2b(f"{key}\n{url}".encode(), digest_size=8).digest())


def choose(key: str, in_flight: Mapping[str, int]) -> str:
    """The sticky server of ``key``, or the least loaded one if that has clearly more than its share.

    ``in_flight``: our requests on each server that may be chosen, not empty.
    """
    sticky = rendezvous(key, tuple(in_flight))
    mean = sum(in_flight.values()) / len(in_flight)
    if in_flight[sticky] <= mean * _OVERLOAD + _SLACK_REQUESTS:
        return sticky
    return min(in_flight, key=lambda url: in_flight[url])


class ServerState(StrEnum):
    """Whether a server takes requests."""

    LIVE = "live"
    SUSPECT = "suspect"
    OUT = "out"


class Pool:
    """The servers by URL, and our requests on them."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._states = dict.fromkeys(urls, ServerState.LIVE)
        self._scopes: dict[str, set[anyio.CancelScope]] = {url: set() for url in urls}
        self._changed = Pulse()

    @property
    def live(self) -> list[str]:
        """Servers that take requests."""
        return [url for url, state in self._states.items() if state is ServerState.LIVE]

    def state(self, url: str) -> ServerState:
        """Whether ``url`` takes requests."""
        return self._states[url]

    def in_flight(self, url: str) -> int:
        """Our requests on ``url``."""
        return len(self._scopes[url])

    def set_state(self, url: str, state: ServerState) -> None:
        """Change who takes requests; a server that goes out loses the requests it has."""
        self._states[url] = state
        if state is ServerState.OUT:
            for scope in self._scopes[url]:
                scope.cancel()
        self._changed.notify()

    async def wait_live(self) -> None:
        """Wait until some server takes requests."""
        await self._changed.wait_until(lambda: bool(self.live))

    def pick(self, key: str, *, avoid: str | None = None) -> str:
        """A live server for a request of ``key``, another one than ``avoid`` if there is one."""
        live = self.live
        candidates = [url for url in live if url != avoid] or live
        return choose(key, {url: len(self._scopes[url]) for url in candidates})

    @contextmanager
    def request(self, url: str) -> Generator[anyio.CancelScope, None, None]:
        """Count a request on ``url``; the scope is cancelled if the server goes out."""
        with anyio.CancelScope() as scope:
            self._scopes[url].add(scope)
            try:
                yield scope
            finally:
                self._scopes[url].discard(scope)
