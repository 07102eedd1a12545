"""Which server gets the next request.

``choose`` is the rule and ``Pool`` the state: who takes requests, how many of ours each has and may have, and which
base weights each holds. A server is in one of four states. *Live* ones take requests. *Suspect* ones answered something
odd: they get no new request until somebody looked at them, but keep what they have. *Out* ones are known to be wrong:
what they have is taken away from them. *Leaving* ones were removed, and are forgotten when what they have has ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.concurrency.notifier import Notifier
from asyncrl.sampling.deadlines import Pace
from asyncrl.sampling.held import HeldCall
from asyncrl.sampling.places import Place

__all__ = ["UNLIMITED", "Pool", "Running", "ServerState", "choose", "rendezvous"]

UNLIMITED = 1_000_000
"""The limit of a server that never had more requests than it could take."""

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
    if len(in_flight) == 1:
        return next(iter(in_flight))
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
    LEAVING = "leaving"


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A request of ours on a server. Interrupting ``held`` takes it away from there."""

    rid: str
    trajectory: str
    anchor: int
    """The version that computed its prefix."""
    work: float
    """What it costs at most; see ``deadlines``."""
    place: Place
    since: float
    """When it began, on the clock of its place."""
    held: HeldCall = field(default_factory=HeldCall)
    late_s: float | None = None
    """How old it was when it was found to be late, and was ended for that."""

    @property
    def age_s(self) -> float:
        """For how long its place could have worked for it."""
        return self.place.clock.now() - self.since


@dataclass(slots=True, kw_only=True, eq=False)
class _PooledServer:
    state: ServerState
    limit: int = UNLIMITED
    version: int | None = None
    running: dict[Running, None] = field(default_factory=dict)
    """In the order in which they began."""
    pace: Pace = field(default_factory=Pace)


class Pool:
    """The servers by URL, and our requests on them."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = {url: _PooledServer(state=ServerState.LIVE) for url in urls}
        self.changed = Notifier()
        """Servers came, went, or changed their state, version or limit."""
        self.traffic = Notifier()
        """A request ended, or the first one began. Only few may wait for this: it happens all the time."""
        self._followers: list[Callable[[int], None]] = []
        self._told_capacity = self.capacity

    def __contains__(self, url: str) -> bool:
        return url in self._servers

    @property
    def busy(self) -> list[str]:
        """Servers with requests of ours."""
        return [url for url, server in self._servers.items() if server.running]

    @property
    def live(self) -> list[str]:
        """Servers that take requests."""
        return [url for url, server in self._servers.items() if server.state is ServerState.LIVE]

    @property
    def staying(self) -> list[str]:
        """All servers but those that leave."""
        return [url for url, server in self._servers.items() if server.state is not ServerState.LEAVING]

    @property
    def capacity(self) -> int:
        """Our requests that all servers together may have; at least 1, so that an outage is noticed by somebody."""
        able = (ServerState.LIVE, ServerState.SUSPECT)
        return max(1, sum(server.limit for server in self._servers.values() if server.state in able))

    def on_capacity(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call ``callback`` with the capacity now and after each change. Returns what ends that."""
        self._followers.append(callback)
        callback(self.capacity)
        return lambda: self._followers.remove(callback)

    def state(self, url: str) -> ServerState:
        """Whether ``url`` takes requests; one that was removed and is forgotten still counts as leaving."""
        return self._servers[url].state if url in self._servers else ServerState.LEAVING

    def in_flight(self, url: str) -> int:
        """Our requests on ``url``."""
        return len(self._servers[url].running) if url in self._servers else 0

    def running(self, url: str) -> Sequence[Running]:
        """Our requests on ``url``, as they are now."""
        return tuple(self._servers[url].running) if url in self._servers else ()

    def server_of(self, trajectory: str) -> str | None:
        """Where the request of ``trajectory`` is, if it has one; looks at all requests, so this is for messages."""
        found = (url for url in self._servers for each in self._servers[url].running if each.trajectory == trajectory)
        return next(found, None)

    def limit(self, url: str) -> int:
        """Our requests that ``url`` may have."""
        return self._servers[url].limit if url in self._servers else UNLIMITED

    def version(self, url: str) -> int | None:
        """The version of the base weights of ``url``, None if it is not known."""
        return self._servers[url].version if url in self._servers else None

    def pace(self, url: str) -> Pace:
        """How fast ``url`` answers; nothing is known of one that was removed."""
        return self._servers[url].pace if url in self._servers else Pace()

    def add(self, url: str, state: ServerState = ServerState.OUT) -> None:
        """A new server, in ``state``, or one that was about to leave; that one takes no requests yet."""
        if url in self._servers:
            self._servers[url].state = ServerState.SUSPECT
        else:
            self._servers[url] = _PooledServer(state=state)
        self._notify()

    def remove(self, url: str, *, now: bool) -> None:
        """Give ``url`` no new request, and forget it when it has none. ``now``: take those that it has away."""
        server = self._servers.get(url)
        if server is None:
            return
        server.state = ServerState.LEAVING
        if now:
            _take_away(server)
        self._forget_if_done(url, server)
        self._notify()

    def set_state(self, url: str, state: ServerState) -> None:
        """Change who takes requests; a server that goes out loses the requests it has, and its version.

        Here and below nothing happens for a server that was removed meanwhile.
        """
        server = self._servers.get(url)
        if server is None:
            return
        server.state = state
        if state is ServerState.OUT:
            server.version = None
            _take_away(server)
        self._notify()

    def set_limit(self, url: str, limit: int) -> None:
        """Change how many requests ``url`` may have; those that it has stay."""
        if url in self._servers:
            self._servers[url].limit = limit
            self._notify()

    def set_version(self, url: str, version: int | None) -> None:
        """``url`` holds base weights of ``version``; None: they are being changed."""
        if url in self._servers:
            self._servers[url].version = version
            self._notify()

    def able(self, version: int | None = None) -> list[str]:
        """Live servers; with a ``version``, those whose base weights it is."""
        if version is None:
            return self.live
        return [url for url in self.live if self._servers[url].version == version]

    async def wait_live(self, version: int | None = None) -> None:
        """Wait until some server takes requests, or requests for ``version``."""
        await self.changed.wait_until(lambda: bool(self.able(version)))

    def pick(self, key: str, *, avoid: str | None = None, version: int | None = None) -> str:
        """A live server for a request of ``key``, if possible one below its limit and another one than ``avoid``.

        There must be one: see ``wait_live``.
        """
        able = self.able(version)
        others = [url for url in able if url != avoid] or able
        counts = {url: len(self._servers[url].running) for url in others}
        roomy = {url: count for url, count in counts.items() if count < self._servers[url].limit}
        return choose(key, roomy or counts)

    @contextmanager
    def request(
        self, place: Place, rid: str, *, trajectory: str, anchor: int, work: float
    ) -> Generator[Running, None, None]:
        """Count a request on ``place``, which must be in the pool."""
        server = self._servers[place.url]
        running = Running(
            rid=rid, trajectory=trajectory, anchor=anchor, work=work, place=place, since=place.clock.now()
        )
        server.running[running] = None
        if len(server.running) == 1:
            self.traffic.notify()
        try:
            yield running
        finally:
            del server.running[running]
            self._forget_if_done(place.url, server)
            self.traffic.notify()

    def _notify(self) -> None:
        self.changed.notify()
        if self.capacity != self._told_capacity:
            self._told_capacity = self.capacity
            for follower in tuple(self._followers):
                follower(self._told_capacity)

    def _forget_if_done(self, url: str, server: _PooledServer) -> None:
        # The same URL may have been added again meanwhile.
        if server.state is ServerState.LEAVING and not server.running and self._servers.get(url) is server:
            del self._servers[url]


def _take_away(server: _PooledServer) -> None:
    for running in server.running:
        running.held.interrupt()
