"""The servers of an open client: who belongs to it, what each must pass before it takes requests, and who answers.

A server that is removed is forgotten at once; requests that it still has end there or move, and whoever asks about it
later hears nothing and gets no error.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from asyncrl.errors import ConfigError, SamplingError, ServerUnavailable
from asyncrl.sampling.aborts import Aborts
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import LONG_S, ServerControl
from asyncrl.sampling.endings import end
from asyncrl.sampling.exchange import Exchange, Front, Lost
from asyncrl.sampling.holdclock import HoldClock
from asyncrl.sampling.labels import Labels
from asyncrl.sampling.loads import LoadMonitor
from asyncrl.sampling.overdue import Overdue
from asyncrl.sampling.places import Router
from asyncrl.sampling.pool import Pool, Running, ServerState
from asyncrl.sampling.recovery import BackOff, Recovery, described
from asyncrl.sampling.served import ask
from asyncrl.sampling.sources import check_urls
from asyncrl.sampling.transport import Client
from asyncrl.types import Segment

__all__ = ["Fleet", "FleetOptions", "Owner", "Timeouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the client waits for servers, in seconds.

    A sampling request has no limit here: how long one may take follows from what its server took for others.
    """

    outage_s: float = 120.0
    """For some server to come back, when none takes requests."""
    publication_s: float = LONG_S
    """For one server to take a version, or to give up an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What ``SGLang`` was made with."""

    router_url: str | None
    api_key: str | None
    admin_key: str | None
    retries: int
    vocab_size: int | None
    allow_version: bool
    timeouts: Timeouts
    seed: int


class Owner(Protocol):
    """Whose servers these are: ``SGLang``."""

    in_place_updates: bool
    labels: Labels

    def notice(self, name: str, *, level: str = "warning", **keys: object) -> None:
        """Report something about the servers."""
        ...

    def repeated(self, url: str, cause: str) -> None:
        """Report that a request is asked again."""
        ...

    async def restore(self, server: ServerControl) -> None:
        """Bring a server to the current policy."""
        ...


class Fleet:
    """Made open, and of no use after ``tasks`` has ended."""

    def __init__(self, client: Client, options: FleetOptions, owner: Owner) -> None:
        self._client = client
        self._options = options
        self._owner = owner
        self._servers: dict[str, ServerControl] = {}
        self._contexts: dict[str, int | None] = {}
        self._router_clock = HoldClock()
        self._back_off = BackOff(options.seed)
        self._tasks: anyio.abc.TaskGroup | None = None
        self.pool = Pool(())
        """Who takes requests, and our requests on them."""
        self._recovery = Recovery(
            self.pool,
            self._bring_to_policy,
            back_off=self._back_off,
            limit_s=options.timeouts.publication_s,
            spawn=self.spawn,
            notice=owner.notice,
        )
        self._exchange = self._make_exchange(self.pool)
        self._front: Front | None = None
        if options.router_url is not None:
            pool = Pool((options.router_url,))
            front = self._control(options.router_url)
            router = Router(front, self._servers.values, self._router_clock)
            self._front = Front(router=router, pool=pool, exchange=self._make_exchange(pool), retries=options.retries)

    async def require(self, urls: Sequence[str]) -> None:
        """Take these servers into use. Raises ``ConfigError`` that names each that does not answer, or is no good."""
        wrong: list[str] = []

        async def require(server: ServerControl) -> None:
            try:
                served = await ask(server, allow_version=self._options.allow_version)
            except SamplingError as error:
                wrong.append(f"no server at URL {server.url}: {described(error)}")
            except ConfigError as error:
                wrong.append(str(error))
            else:
                self._contexts[server.url] = served.context_tokens
                self._owner.labels.found(served.label)

        for url in urls:
            self._servers[url] = self._control(url)
        async with anyio.create_task_group() as tasks:
            for server in self._servers.values():
                tasks.start_soon(require, server)
        if wrong:
            raise ConfigError("; ".join(sorted(wrong)))
        for url in urls:
            self.pool.add(url, ServerState.LIVE)

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Watch loads and late requests, in ``tasks`` as everything that runs in the background."""
        self._tasks = tasks
        tasks.start_soon(LoadMonitor(self.pool, self._servers.get, self._owner.notice).run)
        overdue = Overdue(
            self.pool if self._front is None else self._front.pool,
            suspect=self.suspect,
            quarantine=self.quarantine,
            spawn=self.spawn,
            notice=self._owner.notice,
        )
        tasks.start_soon(overdue.run)

    def spawn(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``function`` beside everything else."""
        assert self._tasks is not None, "nothing runs before the servers were required"
        self._tasks.start_soon(function)

    async def sample(self, request: SegmentRequest) -> Segment:
        """Ask one server after the other, within the retries."""
        self._exchange.require_ids(request.input_ids)
        if self._front is not None:
            return await self._front.sample(request)
        version = request.version if request.replica else None
        reasons: list[str] = []
        avoid = self._exchange.shunned(request)
        lost: Lost | None = None
        while len(reasons) <= self._options.retries:
            self._owner.labels.require_ours()
            if lost is not None and self.pool.state(avoid or "") is ServerState.LIVE:
                # It refused for now but is not gone, so it is busy. One that is gone is waited for below.
                await anyio.sleep(self._back_off.seconds(len(reasons)))
            if not self.pool.able(version):
                await self.wait_live(version)
            url = self.pool.pick(request.trajectory_id, avoid=avoid, version=version)
            if lost is not None:
                self._owner.repeated(url, "late" if lost.late else "same_server" if url == avoid else "other_server")
            outcome = await self._exchange.ask(self._servers[url], request)
            if isinstance(outcome, Segment):
                return outcome
            lost, avoid = outcome, url
            reasons.append(f"{url}: {outcome.reason}")
        raise ServerUnavailable(f"no answer in {len(reasons)} attempts: {'; '.join(reasons)}")

    async def wait_live(self, version: int | None) -> None:
        """See ``SGLang.wait_live``."""
        outage_s = self._options.timeouts.outage_s
        try:
            with anyio.fail_after(outage_s):
                await self.pool.wait_live(version)
        except TimeoutError as error:
            with_version = "" if version is None else f" with version {version}"
            foreign = self._owner.labels.last_foreign
            raise ServerUnavailable(
                f"none of {', '.join(self.pool.staying)} came back{with_version} within {outage_s:g} s"
                f"{'; ' if foreign else ''}{foreign}"
            ) from error

    @property
    def live(self) -> list[ServerControl]:
        """The servers that take requests."""
        return [self._servers[url] for url in self.pool.live]

    @property
    def context_tokens(self) -> int | None:
        """See ``SGLang.context_tokens``."""
        return min((tokens for tokens in self._contexts.values() if tokens is not None), default=None)

    def server_of(self, trajectory: str) -> str | None:
        """See ``SGLang.server_of``."""
        return (self.pool if self._front is None else self._front.pool).server_of(trajectory)

    def oldest_call(self) -> tuple[float, str] | None:
        """See ``SGLang.oldest_call``."""
        calls = [
            (since, server.url + route) for server in self._servers.values() for since, route in server.calls.values()
        ]
        return min(calls, default=None)

    def add(self, url: str) -> None:
        """See ``SGLang.add``."""
        (url,) = check_urls([url], key="url")
        if url in self.pool.staying:
            raise ConfigError.for_value("url", url, "a server that is not in use")
        self._servers[url] = self._control(url)
        self.pool.add(url)
        self._owner.notice("server_added", level="info", url=url)
        self._recovery.bring_back(self._servers[url], "it was added", at_once=True)

    def remove(self, url: str, *, now: bool) -> None:
        """See ``SGLang.remove``."""
        url = url.rstrip("/")
        staying = self.pool.staying
        if url not in staying or len(staying) == 1:
            allowed = f"one of {', '.join(staying)}"
            if url in staying:
                allowed = "another one, for it is the last server: add another first"
            raise ConfigError.for_value("url", url, allowed)
        self._recovery.forget(url)
        self.pool.remove(url, now=now)
        del self._servers[url]
        self._contexts.pop(url, None)
        self._owner.notice("server_removed", level="info", url=url)

    def suspect(self, url: str, reason: str) -> None:
        """See ``SGLang.suspect``."""
        if url in self._servers:
            self._recovery.suspect(self._servers[url], reason)

    def quarantine(self, url: str, reason: str) -> None:
        """See ``SGLang.quarantine``."""
        if url in self._servers:
            self._recovery.quarantine(self._servers[url], reason)

    async def vacate(self, url: str) -> None:
        """See ``SGLang.vacate``."""
        await self._end(url, lambda running: True)

    async def abort_older(self, url: str, anchor: int) -> None:
        """See ``SGLang.abort_older``."""
        exchange = self._exchange if self._front is None else self._front.exchange
        exchange.oldest_anchor = max(exchange.oldest_anchor, anchor)
        await self._end(url, lambda running: running.anchor < anchor)

    async def _end(self, url: str, chosen: Callable[[Running], bool]) -> None:
        server = self._servers.get(url)
        if server is None:
            return
        if self._front is None:
            await end(self.pool, url, chosen, server)
        else:
            # Nobody knows what runs where, so nobody knows when it has ended there.
            await end(self._front.pool, self._front.router.url, chosen, server, waits=False)

    def _make_exchange(self, pool: Pool) -> Exchange:
        return Exchange(
            pool,
            Aborts(pool, self.spawn, self._owner.notice),
            suspect=self.suspect,
            # Behind a router it may be any of them.
            context_of=lambda url: self._contexts.get(url, self.context_tokens),
            in_place=lambda: self._owner.in_place_updates,
            repeated=self._owner.repeated,
            vocab_size=self._options.vocab_size,
            labels=self._owner.labels,
        )

    def _control(self, url: str) -> ServerControl:
        options = self._options
        return ServerControl(
            self._client,
            url,
            api_key=options.api_key,
            admin_key=options.admin_key,
            long_s=options.timeouts.publication_s,
            clock=HoldClock(also=self._router_clock),
        )

    async def _bring_to_policy(self, server: ServerControl) -> None:
        """What a server must pass before it takes requests again. It may be another program than before."""
        relied_on = self.context_tokens
        served = await ask(server, allow_version=self._options.allow_version)
        if server.url not in self._contexts:
            self._owner.labels.found(served.label)
        if relied_on is not None and (served.context_tokens or relied_on) < relied_on:
            raise ServerUnavailable(
                f"{server.url} has a context of {served.context_tokens} tokens, but the run relies on {relied_on}"
            )
        await self._owner.restore(server)
        if self._servers.get(server.url) is server:
            self._contexts[server.url] = served.context_tokens
