"""The servers of a client: who belongs to it, what each must pass before it takes requests, and who answers.

A server that is removed is forgotten at once; requests that it still has end there or move, and whoever asks about it
later hears nothing and gets no error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from asyncrl.errors import ConfigError, SamplingError, ServerUnavailable
from asyncrl.events import Events, Notice, RequestRepeated
from asyncrl.sampling.aborts import Aborts, end
from asyncrl.sampling.backend import Restore, SamplingBackend, ServerFleet, Timeouts
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import ServerControl, ask
from asyncrl.sampling.deadlines import HoldClock
from asyncrl.sampling.exchange import BehindRouter, Exchange, Failed
from asyncrl.sampling.labels import Labels, Writer
from asyncrl.sampling.loads import LoadMonitor
from asyncrl.sampling.overdue import Overdue
from asyncrl.sampling.places import Router
from asyncrl.sampling.pool import Pool, Running, ServerState
from asyncrl.sampling.recovery import BackOff, Restorer, described, require_nothing
from asyncrl.sampling.sources import ChangingSource, ServerSource, check_urls
from asyncrl.sampling.transport import Client
from asyncrl.types import Segment

__all__ = ["Fleet", "FleetOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What ``SGLang`` was made with."""

    router_url: str | None
    api_key: str | None
    admin_key: str | None
    retries: int
    allow_version: bool
    timeouts: Timeouts
    starts_servers: bool
    seed: int


class Fleet(SamplingBackend, ServerFleet):
    """What ``SGLang`` is apart from where its servers come from.

    It has servers while it is open, and each opening begins without any. What happens to them is reported as ``Notice``
    in ``events``.
    """

    def __init__(self, options: FleetOptions) -> None:
        self.events = Events()
        self.labels = Labels()
        self.timeouts = options.timeouts
        self.starts_servers = options.starts_servers
        self.opens_connections = True
        self.fleet: Fleet = self
        self._options = options
        self._restore: Restore = require_nothing
        self._in_place = False
        self._client: Client | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._begin(None, None)

    def _begin(self, client: Client | None, vocab_size: int | None) -> None:
        """Without servers; ``client`` is None when it is closed."""
        options = self._options
        self._client = client
        self._servers: dict[str, ServerControl] = {}
        self._contexts: dict[str, int | None] = {}
        self._router_clock = HoldClock()
        self._back_off = BackOff(options.seed)
        self.pool = Pool(())
        """Who takes requests, and our requests on them."""
        self._restorer = Restorer(self.pool, self, self._bring_to_policy, self._back_off)
        self._asked = self.pool if options.router_url is None else Pool((options.router_url,))
        # Where our requests are: on the servers, or all at the router.
        self._exchange = Exchange(
            self._asked,
            Aborts(self._asked, self),
            suspect=self.suspect,
            # Behind a router it may be any of them.
            context_of=lambda url: self._contexts.get(url, self.context_tokens),
            in_place=lambda: self._in_place,
            repeated=self._repeated,
            vocab_size=vocab_size,
            labels=self.labels,
        )
        self._behind_router: BehindRouter | None = None
        if options.router_url is not None and client is not None:
            router = Router(self._control(options.router_url), self._servers.values, self._router_clock)
            self._behind_router = BehindRouter(router=router, exchange=self._exchange, retries=options.retries)

    @asynccontextmanager
    async def _opened_with(
        self, client: Client, urls: Sequence[str], source: ServerSource, *, vocab_size: int | None
    ) -> AsyncGenerator[None, None]:
        """Take the servers at ``urls`` into use, and those that ``source`` says later. Raises as ``opened``."""
        self._begin(client, vocab_size)
        try:
            await self._require(urls)
            async with anyio.create_task_group() as tasks:
                self._start(tasks, source)
                yield
                tasks.cancel_scope.cancel()
        finally:
            # Not before everything in the background has ended: until then it may need its servers.
            self._tasks = None
            self._begin(None, None)

    @property
    def is_open(self) -> bool:
        """True from the first question to a server to the end of the last task."""
        return self._client is not None

    def _open_tasks(self, name: str) -> anyio.abc.TaskGroup:
        """What runs in the background. Raises ``ConfigError``, which says that ``SGLang.name`` needs open servers."""
        if self._tasks is None:
            raise ConfigError(
                f"SGLang.{name} needs open servers, and this one is not open: use it inside "
                "`async with sampler.opened()`, or while a run uses it"
            )
        return self._tasks

    async def _require(self, urls: Sequence[str]) -> None:
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
                self.labels.found(served.label)

        for url in urls:
            self._servers[url] = self._control(url)
        async with anyio.create_task_group() as tasks:
            for server in self._servers.values():
                tasks.start_soon(require, server)
        if wrong:
            raise ConfigError("; ".join(sorted(wrong)))
        for url in urls:
            self.pool.add(url, ServerState.LIVE)

    def _start(self, tasks: anyio.abc.TaskGroup, source: ServerSource) -> None:
        """Watch loads, late requests and the source, in ``tasks`` as everything that runs in the background."""
        self._tasks = tasks
        tasks.start_soon(LoadMonitor(self.pool, self._servers.get, self.notice).run)
        tasks.start_soon(Overdue(self._asked, self).run)
        if isinstance(source, ChangingSource):
            tasks.start_soon(self._follow, source)

    async def _follow(self, source: ChangingSource) -> None:
        """Add and remove servers as ``source`` says. A failed look changes nothing, and is told once."""
        failing = False

        async def changed(found: Sequence[str] | Exception) -> None:
            nonlocal failing
            if isinstance(found, Exception):
                if not failing:
                    self.notice("servers_unknown", source=str(source), reason=str(found))
                failing = True
                return
            failing = False
            # New ones first: the last server cannot be removed.
            for url in found:
                if url not in self.urls:
                    self.add(url)
            for url in self.urls:
                if url not in found:
                    self.remove(url)

        await source.watch(changed)

    def spawn(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``function`` beside everything else, until it ends or the servers are closed."""
        self._open_tasks("spawn").start_soon(function)

    def notice(self, name: str, *, level: str = "warning", **keys: object) -> None:
        """Report something about the servers."""
        self.events.emit(Notice(time=anyio.current_time(), name=name, level=level, keys=keys))

    def _repeated(self, url: str, cause: str) -> None:
        self.events.emit(RequestRepeated(time=anyio.current_time(), url=url, cause=cause))

    def claim(self, writer: Writer | None, restore: Restore, *, in_place: bool = False) -> None:
        """Take the servers over for a publisher; see ``ServerFleet``."""
        self.labels.claim(writer)
        self._restore = restore
        self._in_place = in_place

    async def sample(self, request: SegmentRequest) -> Segment:
        """Ask one server after the other, within the retries."""
        self._open_tasks("sample")
        self._exchange.require_ids(request.input_ids)
        if self._behind_router is not None:
            return await self._behind_router.sample(request)
        version = request.version if request.replica else None
        reasons: list[str] = []
        avoid = self._exchange.shunned(request)
        failed: Failed | None = None
        while len(reasons) <= self._options.retries:
            self.labels.require_ours()
            if failed is not None and self.pool.state(avoid or "") is ServerState.LIVE:
                # It refused for now but is not gone, so it is busy. One that is gone is waited for below.
                await anyio.sleep(self._back_off.seconds(len(reasons)))
            if not self.pool.able(version):
                await self.wait_live(version)
            url = self.pool.pick(request.trajectory_id, avoid=avoid, version=version)
            if failed is not None:
                self._repeated(url, "late" if failed.late else "same_server" if url == avoid else "other_server")
            outcome = await self._exchange.ask(self._servers[url], request)
            if isinstance(outcome, Segment):
                return outcome
            failed, avoid = outcome, url
            reasons.append(f"{url}: {outcome.reason}")
        raise ServerUnavailable(f"no answer in {len(reasons)} attempts: {'; '.join(reasons)}")

    async def wait_live(self, version: int | None = None) -> None:
        """Wait until a server takes requests for ``version``. Raises ``ServerUnavailable`` after a time limit."""
        self._open_tasks("wait_live")
        outage_s = self.timeouts.outage_s
        try:
            with anyio.fail_after(outage_s):
                await self.pool.wait_live(version)
        except TimeoutError as error:
            with_version = "" if version is None else f" with version {version}"
            foreign = self.labels.last_foreign
            raise ServerUnavailable(
                f"none of {', '.join(self.pool.staying)} came back{with_version} within {outage_s:g} s"
                f"{'; ' if foreign else ''}{foreign}"
            ) from error

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``, about who takes requests and of which version, holds."""
        self._open_tasks("wait_until")
        await self.pool.changed.wait_until(condition)

    @property
    def live(self) -> list[ServerControl]:
        """The servers that take requests; none if it is not open."""
        return [self._servers[url] for url in self.pool.live]

    @property
    def urls(self) -> list[str]:
        """All servers that were not removed, whether they take requests or not; none if it is not open."""
        return self.pool.staying

    @property
    def versions(self) -> dict[str, int | None]:
        """The version of the base weights of each server that takes requests; None: not known, or being changed."""
        return {url: self.pool.version(url) for url in self.pool.live}

    def serving(self, url: str, version: int | None) -> None:
        """The base weights of ``url`` are ``version``, as long as the server is in use."""
        self.pool.set_version(url, version)

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of prompt and output together that every server takes; None if no server says."""
        return min((tokens for tokens in self._contexts.values() if tokens is not None), default=None)

    def on_capacity(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call ``callback`` with how many requests the servers should have at once: now and after each change.

        Requests beyond it wait in servers and grow old there. Returns what ends the subscription.
        """
        self._open_tasks("on_capacity")
        return self.pool.on_capacity(callback)

    def server_of(self, trajectory: str) -> str | None:
        """The server, or the router, that has a request of ``trajectory`` now; for messages."""
        return self._asked.server_of(trajectory)

    def oldest_call(self) -> tuple[float, str] | None:
        """Since when the oldest control call is under way, and its URL; for messages."""
        calls = [
            (since, server.url + route) for server in self._servers.values() for since, route in server.calls.values()
        ]
        return min(calls, default=None)

    def add(self, url: str) -> None:
        """Take another server into use, as soon as it was brought to the current policy."""
        self._open_tasks("add")
        (url,) = check_urls([url], key="url")
        if url in self.pool.staying:
            raise ConfigError.for_value("url", url, "a server that is not in use")
        self._servers[url] = self._control(url)
        self.pool.add(url)
        self.notice("server_added", level="info", url=url)
        self._restorer.bring_back(self._servers[url], "it was added", at_once=True)

    def remove(self, url: str, *, now: bool = False) -> None:
        """Give a server no new requests and forget it when it has none. ``now``: those that it has move elsewhere."""
        self._open_tasks("remove")
        url = url.rstrip("/")
        staying = self.pool.staying
        if url not in staying or len(staying) == 1:
            allowed = f"one of {', '.join(staying)}"
            if url in staying:
                allowed = "another one, for it is the last server: add another first"
            raise ConfigError.for_value("url", url, allowed)
        self._restorer.forget(url)
        self.pool.remove(url, now=now)
        del self._servers[url]
        self._contexts.pop(url, None)
        self.notice("server_removed", level="info", url=url)

    def suspect(self, url: str, reason: str) -> None:
        """Give ``url`` no new request before it was looked at; what runs there goes on."""
        if url in self._servers:
            self._restorer.suspect(self._servers[url], reason)

    def quarantine(self, url: str, reason: str) -> None:
        """Take ``url`` out of use: its requests move to other servers, and it comes back once it could be restored."""
        if url in self._servers:
            self._restorer.quarantine(self._servers[url], reason)

    async def vacate(self, url: str) -> None:
        """Abort all our requests on ``url`` and wait until they were answered, as ``abort_older`` does."""
        self._open_tasks("vacate")
        await self._end(url, lambda running: True)

    async def abort_older(self, url: str, anchor: int) -> None:
        """Abort our requests on ``url`` whose prefix is older than ``anchor``, and wait until they were answered.

        From now on no such request leaves for any server: it comes back aborted, without a token. One that is not
        answered within half a minute is taken away and comes back in the same way. With a router nobody knows what runs
        where: they are aborted, and not waited for.
        """
        self._open_tasks("abort_older")
        self._exchange.refuse_older(anchor)
        await self._end(url, lambda running: running.anchor < anchor)

    async def _end(self, url: str, chosen: Callable[[Running], bool]) -> None:
        server = self._servers.get(url)
        if server is None:
            return
        if self._behind_router is None:
            await end(self.pool, url, chosen, server)
        else:
            # Nobody knows what runs where, so nobody knows when it has ended there.
            await end(self._asked, self._behind_router.router.url, chosen, server, waits=False)

    def _control(self, url: str) -> ServerControl:
        options = self._options
        assert self._client is not None, "servers are made while it is open"
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
            self.labels.found(served.label)
        if relied_on is not None and (served.context_tokens or relied_on) < relied_on:
            raise ServerUnavailable(
                f"{server.url} has a context of {served.context_tokens} tokens, but the run relies on {relied_on}"
            )
        await self._restore(server)
        if self._servers.get(server.url) is server:
            self._contexts[server.url] = served.context_tokens
