"""What a run asks of whatever samples, beside segments, and what publishers ask of its servers.

A new kind of sampling servers is a class that inherits from ``SamplingBackend`` and has a ``fleet`` for publishers. A
sampler without servers needs no more than ``Sampler``: ``as_backend`` gives it the answers of one that has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from asyncrl.events import Events
from asyncrl.sampling.base import Sampler, SegmentRequest
from asyncrl.sampling.control import LONG_S, ServerControl
from asyncrl.sampling.labels import Labels, Writer
from asyncrl.types import Segment

__all__ = ["Restore", "SamplingBackend", "ServerFleet", "Timeouts", "as_backend"]


Restore: TypeAlias = Callable[[ServerControl], Awaitable[None]]
"""Brings a server to the current policy, or raises ``SamplingError``, ``PublicationError`` or ``TimeoutError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the client waits for servers, in seconds.

    A sampling request has no limit here: how long one may take follows from what its server took for others.
    """

    outage_s: float = 120.0
    """Seconds for some server to come back, when none takes requests."""
    publication_s: float = LONG_S
    """Seconds for one server to take a version, or to give up an adapter."""


class ServerFleet(Protocol):
    """Servers that weights are published to. Real: ``SGLang``."""

    labels: Labels
    """Which weights on the servers are ours."""
    timeouts: Timeouts
    starts_servers: bool
    """True if they end when they are closed; others go on, and keep what they were given."""

    @property
    def live(self) -> list[ServerControl]:
        """The servers that take requests."""
        ...

    @property
    def urls(self) -> list[str]:
        """All servers that were not removed, whether they take requests or not."""
        ...

    @property
    def versions(self) -> dict[str, int | None]:
        """The version of the base weights of each server that takes requests; None: not known, or being changed."""
        ...

    def claim(self, writer: Writer | None, restore: Restore, *, in_place: bool = False) -> None:
        """Called once by each publisher: the servers have weights of ``writer`` from now on (None: plain numbers).

        ``restore`` must succeed on a server that is new or was away before it takes requests. ``in_place``: weights
        change under running requests.
        """
        ...

    def serving(self, url: str, version: int | None) -> None:
        """The base weights of ``url`` are ``version``; forgotten when the server goes out."""
        ...

    def suspect(self, url: str, reason: str) -> None:
        """Give ``url`` no new request before it was looked at; what runs there goes on."""
        ...

    def quarantine(self, url: str, reason: str) -> None:
        """Take ``url`` out of use until it could be restored."""
        ...

    async def wait_live(self, version: int | None = None) -> None:
        """Wait until a server takes requests, or requests that need base weights of ``version``.

        Raises ``ServerUnavailable`` after ``timeouts.outage_s``.
        """
        ...

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``, about who takes requests and of which version, holds."""
        ...

    async def vacate(self, url: str) -> None:
        """Abort all our requests on ``url`` and wait until they were answered."""
        ...

    async def abort_older(self, url: str, anchor: int) -> None:
        """Abort our requests on ``url`` whose prefix is older than ``anchor``, and wait until they were answered."""
        ...

    def spawn(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``function`` beside everything else, until it ends or the servers are closed."""
        ...

    def notice(self, name: str, *, level: str = "warning", **keys: object) -> None:
        """Report something about the servers."""
        ...


class SamplingBackend(Sampler):
    """A sampler that says what it is. Every answer here is that of one without servers."""

    fleet: ServerFleet | None = None
    """What weights are published to; None: it needs a publisher of its own."""
    opens_connections: bool = False
    """True if each sampling request has a connection of its own."""
    starts_servers: bool = False
    """True if opening it takes as long as servers take to load a model."""
    may_be_many: bool = False
    """True if there may be two or more servers."""

    def opened(
        self, *, vocab_size: int | None = None, events: Events | None = None
    ) -> AbstractAsyncContextManager[object]:
        """Connections, from the first request to the last.

        ``vocab_size``: of the model; ids from there on may be refused. ``events`` get what happens to servers.
        """
        raise NotImplementedError

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of prompt and output together that every server takes; None if no server says."""
        return None

    def on_capacity(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call ``callback`` with the number of requests that can run, now and after each change, if that is bounded.

        Returns what ends that.
        """
        return lambda: None

    def server_of(self, trajectory: str) -> str | None:
        """The server that has a request of ``trajectory`` now; for messages."""
        return None

    def oldest_call(self) -> tuple[float, str] | None:
        """Since when the oldest control call is under way, and its URL; for messages."""
        return None


class _WithoutServers(SamplingBackend):
    """A sampler that can do nothing but sample."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def opened(
        self, *, vocab_size: int | None = None, events: Events | None = None
    ) -> AbstractAsyncContextManager[object]:
        return self._sampler.opened()

    def sample(self, request: SegmentRequest) -> Coroutine[Any, Any, Segment]:
        return self._sampler.sample(request)


def as_backend(sampler: Sampler) -> SamplingBackend:
    """``sampler`` itself if it says what it is; else with the answers of one that has no servers."""
    return sampler if isinstance(sampler, SamplingBackend) else _WithoutServers(sampler)
