"""SGLang: the client of one or many sampling servers.

It promises that a request is answered by exactly one server that holds the current policy, or raises; that a cancelled
or repeated request is aborted where it ran; and that a server which was away or is new takes no request before it was
brought to the current policy. What is on the wire is in ``wire``, which server gets a request in ``pool``, how many at
once in ``loads``, how a server comes back in ``recovery``; what it must hold is told by the publisher.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.abc
import httpx

from asyncrl.errors import ConfigError, SamplingError, ServerUnavailable
from asyncrl.events import Events, Notice
from asyncrl.learning.lora import LoraConfig
from asyncrl.publishing.probe import model_vocab_size
from asyncrl.sampling.aborts import Aborts
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.exchange import Exchange, Front, Router
from asyncrl.sampling.loads import LoadMonitor
from asyncrl.sampling.pool import Pool, Running, ServerState
from asyncrl.sampling.recovery import BackOff, Recovery, Restore, described
from asyncrl.sampling.served import ask
from asyncrl.sampling.sglangcommand import SGLangOptions
from asyncrl.sampling.sglangserver import LaunchedServers
from asyncrl.sampling.sources import ChangingSource, ServerSource, check_urls, follow, source_of
from asyncrl.sampling.transport import Client, open_client
from asyncrl.types import Segment

__all__ = ["Restore", "SGLang", "Timeouts"]

_ANSWER_S = 30.0
_REPEAT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the client waits for servers, in seconds. A sampling request has no limit, for a pause may hold it."""

    outage_s: float = 120.0
    """For some server to come back, when none takes requests."""
    publication_s: float = 300.0
    """For one server to take a version, or to give up an adapter."""


class SGLang:
    """Sampling servers that speak SGLang's native HTTP interface.

    ``urls``: the servers themselves, not a router: weights and aborts must reach each of them. A list, or a source:
    ``FileSource`` and ``DnsSource`` are looked at again while running.
    ``router``: URL of a router in front of the same servers; sampling requests go there, everything else to each
    server. It chooses the server, retries and balances: what this client does about these is then left out.
    ``api_key``, ``admin_key``: bearer tokens for sampling and, if the servers have a second one, for control.
    ``transport``: replaces the network, for tests.
    ``retries``: further attempts of a request whose server was lost or overloaded.
    ``vocab_size``: if given, ids outside of it are refused here; some servers do not survive them.
    ``allow_version``: take servers of versions that are not known to work.
    ``seed``: for the jitter of back-offs.

    What happens to servers is reported as ``Notice`` in ``events``.
    """

    def __init__(  # noqa: PLR0913  the options of a client; each is a sentence above
        self,
        urls: Sequence[str] | ServerSource,
        *,
        router: str | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        retries: int = 3,
        vocab_size: int | None = None,
        allow_version: bool = False,
        seed: int = 0,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.events = Events()
        self.timeouts = timeouts or Timeouts()
        self.in_place_updates = False
        """True if weights change under running requests; the publisher says so."""
        self.starts_servers = False
        """True if opening it takes as long as servers take to load a model."""
        self._source = source_of(urls)
        self._router_url = None if router is None else check_urls([router], key="sampler.router")[0]
        self._keys = (api_key, admin_key)
        self._transport = transport
        self._retries = retries
        self.vocab_size = vocab_size
        """Ids from here on are refused when sampling; to be set before it is opened."""
        self.may_be_many = self._source.servers != 1
        """False if there will be one server, unless others are added."""
        self._allow_version = allow_version
        self._back_off = BackOff(seed)
        self._restore: Restore = _require_nothing
        self._front: Front | None = None
        self._servers: dict[str, ServerControl] = {}
        self._contexts: dict[str, int | None] = {}
        self._client: Client
        self._tasks: anyio.abc.TaskGroup
        self._pool: Pool
        self._exchange: Exchange
        self._recovery: Recovery

    @classmethod
    def launch(
        cls,
        model: Path | str | SGLangOptions,
        *,
        servers: int = 1,
        lora: LoraConfig | None = None,
        log_directory: Path | None = None,
    ) -> Self:
        """Real SGLang servers of our own on this machine, which start when this is opened and end with it.

        ``model``: the folder that the learner starts from, or all options of a server. ``lora``: what is trained, if
        it is an adapter. ``log_directory``: gets what the servers print, None keeps it in temporary files.
        """
        options = model if isinstance(model, SGLangOptions) else SGLangOptions(model=Path(model))
        if lora is not None:
            options = replace(options, lora=lora)
        source = LaunchedServers(options, servers=servers, log_directory=log_directory)
        sampler = cls(
            source,
            api_key=options.api_key,
            admin_key=options.admin_key,
            vocab_size=model_vocab_size(options.model),
            allow_version=options.allow_version,
            # As long as a server that died may need to come back.
            timeouts=Timeouts(outage_s=options.start_timeout_s),
        )
        source.events.subscribe(sampler.events.emit)
        sampler.starts_servers = True
        return sampler

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Self, None]:
        """Connect, and require an answer of every server: raises ``ConfigError`` naming those that give none."""
        async with AsyncExitStack() as stack:
            urls = check_urls(await stack.enter_async_context(self._source.opened()))
            self._client = await stack.enter_async_context(open_client(self._transport))
            self._servers = {url: self._control(url) for url in urls}
            self._contexts = {}
            await self._require_servers()
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._open_parts(urls)
                yield self
                tasks.cancel_scope.cancel()

    async def sample(self, request: SegmentRequest) -> Segment:
        """Sample one segment; see ``Sampler``."""
        self._exchange.require_ids(request.input_ids)
        if self._front is not None:
            return await self._front.sample(request)
        version = request.version if request.replica else None
        lost: list[str] = []
        avoid: str | None = None
        while len(lost) <= self._retries:
            if avoid is not None and self._pool.state(avoid) is ServerState.LIVE:
                # It refused for now but is not gone, so it is busy. One that is gone is waited for below.
                await anyio.sleep(self._back_off.seconds(len(lost)))
            if not self._pool.able(version):
                await self.wait_live(version)
            url = self._pool.pick(request.trajectory_id, avoid=avoid, version=version)
            outcome = await self._exchange.ask(self._servers[url], request)
            if isinstance(outcome, Segment):
                return outcome
            lost.append(f"{url}: {outcome}")
            avoid = url
        raise ServerUnavailable(f"no answer in {len(lost)} attempts: {'; '.join(lost)}")

    @property
    def live(self) -> list[ServerControl]:
        """The servers that take requests."""
        return [self._servers[url] for url in self._pool.live]

    @property
    def urls(self) -> list[str]:
        """All servers that were not removed, whether they take requests or not."""
        return self._pool.staying

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of prompt and output together that every server takes; None if no server says."""
        return min((tokens for tokens in self._contexts.values() if tokens is not None), default=None)

    async def wait_live(self, version: int | None = None) -> None:
        """Wait until a server takes requests, or requests that need base weights of ``version``.

        Raises ``ServerUnavailable`` after ``timeouts.outage_s``.
        """
        try:
            with anyio.fail_after(self.timeouts.outage_s):
                await self._pool.wait_live(version)
        except TimeoutError as error:
            with_version = "" if version is None else f" with version {version}"
            raise ServerUnavailable(
                f"none of {', '.join(self.urls)} came back{with_version} within {self.timeouts.outage_s:g} s"
            ) from error

    def add(self, url: str) -> None:
        """Take another server into use, as soon as it was brought to the current policy."""
        (url,) = check_urls([url])
        if url in self._pool.staying:
            raise ConfigError.for_value("url", url, "a server that is not in use")
        self._servers[url] = self._control(url)
        self._pool.add(url)
        self.notice("server_added", level="info", url=url)
        self._recovery.bring_back(self._servers[url], "it was added", at_once=True)

    def remove(self, url: str, *, now: bool = False) -> None:
        """Give a server no new requests and forget it when it has none. ``now``: those that it has move elsewhere."""
        url = url.rstrip("/")
        if url not in self._pool.staying or len(self._pool.staying) == 1:
            others = [other for other in self._pool.staying if len(self._pool.staying) > 1]
            allowed = f"one of {', '.join(others)}" if others else "left, for it is the last server: add another first"
            raise ConfigError.for_value("url", url, allowed)
        self._recovery.forget(url)
        self._pool.remove(url, now=now)
        del self._servers[url]
        self._contexts.pop(url, None)
        self.notice("server_removed", level="info", url=url)

    @property
    def versions(self) -> dict[str, int | None]:
        """The version of the base weights of each server that takes requests; None: not known, or being changed."""
        return {url: self._pool.version(url) for url in self._pool.live}

    def serving(self, url: str, version: int | None) -> None:
        """The publisher says: the base weights of ``url`` are ``version``. Forgotten when the server goes out."""
        self._pool.set_version(url, version)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``, about who takes requests and of which version, holds."""
        await self._pool.changed.wait_until(condition)

    async def vacate(self, url: str) -> None:
        """Abort all our requests on ``url`` and wait until they were answered, as ``abort_older`` does."""
        await self._end(url, lambda running: True)

    async def abort_older(self, url: str, anchor: int) -> None:
        """Abort our requests on ``url`` whose prefix is older than ``anchor``, and wait until they were answered.

        From now on no such request leaves for any server: it comes back aborted, without a token. One that is not
        answered within half a minute is taken away and comes back in the same way. With a router nobody knows what runs
        where: they are aborted, and not waited for.
        """
        exchange = self._exchange if self._front is None else self._front.exchange
        exchange.oldest_anchor = max(exchange.oldest_anchor, anchor)
        await self._end(url, lambda running: running.anchor < anchor)

    async def _end(self, url: str, chosen: Callable[[Running], bool]) -> None:
        server = self._servers[url]
        pool, place = (self._pool, url) if self._front is None else (self._front.pool, self._front.router.url)

        def left() -> list[Running]:
            return [running for running in pool.running(place) if chosen(running)]

        with anyio.move_on_after(_ANSWER_S):
            while unanswered := left():
                # Again and again, for an abort has no effect if it overtakes its request.
                async with anyio.create_task_group() as tasks:
                    for running in unanswered:
                        tasks.start_soon(server.abort, running.rid)
                if self._front is not None:
                    return
                with anyio.move_on_after(_REPEAT_S):
                    await pool.traffic.wait_until(lambda: not left())
        for running in left():
            running.scope.cancel()

    def on_capacity(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call ``callback`` with how many requests the servers should have at once: now and after each change.

        Requests beyond it wait in servers and grow old there. Returns what ends the subscription.
        """
        return self._pool.on_capacity(callback)

    def restore_with(self, restore: Restore) -> None:
        """``restore`` must succeed on a server that is new or was away before it takes requests."""
        self._restore = restore

    def spawn(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``function`` beside everything else, until it ends or the client is closed."""
        self._tasks.start_soon(function)

    def notice(self, name: str, *, level: str = "warning", **keys: object) -> None:
        """Report something about the servers."""
        self.events.emit(Notice(time=anyio.current_time(), name=name, level=level, keys=keys))

    def suspect(self, url: str, reason: str) -> None:
        """Give ``url`` no new request before it was looked at; what runs there goes on."""
        if url in self._servers:
            self._recovery.suspect(self._servers[url], reason)

    def quarantine(self, url: str, reason: str) -> None:
        """Take ``url`` out of use: its requests move to other servers, and it comes back once it could be restored."""
        if url in self._servers:
            self._recovery.quarantine(self._servers[url], reason)

    async def _require_servers(self) -> None:
        silent: list[str] = []

        async def require(server: ServerControl) -> None:
            try:
                self._contexts[server.url] = (await ask(server, allow_version=self._allow_version)).context_tokens
            except SamplingError as error:
                silent.append(f"no server at URL {server.url}: {described(error)}")
            except ConfigError as error:
                silent.append(str(error))

        async with anyio.create_task_group() as tasks:
            for server in self._servers.values():
                tasks.start_soon(require, server)
        if silent:
            raise ConfigError("; ".join(sorted(silent)))

    def _open_parts(self, urls: Sequence[str]) -> None:
        self._pool = Pool(urls)
        self._recovery = Recovery(
            self._pool,
            self._bring_to_policy,
            back_off=self._back_off,
            limit_s=self.timeouts.publication_s,
            spawn=self.spawn,
            notice=self.notice,
        )
        self._exchange = self._make_exchange(self._pool)
        if self._router_url is not None:
            pool = Pool([self._router_url])
            router = Router(self._control(self._router_url), self._servers.values)
            self._front = Front(router=router, pool=pool, exchange=self._make_exchange(pool))
        self._tasks.start_soon(LoadMonitor(self._pool, self._servers.get, self.notice).run)
        if isinstance(self._source, ChangingSource):
            self._tasks.start_soon(follow, self._source, self)

    def _make_exchange(self, pool: Pool) -> Exchange:
        return Exchange(
            pool,
            Aborts(pool, self.spawn, self.notice),
            suspect=self.suspect,
            # Behind a router it may be any of them.
            context_of=lambda url: self._contexts.get(url, self.context_tokens),
            in_place=lambda: self.in_place_updates,
            vocab_size=self.vocab_size,
        )

    def _control(self, url: str) -> ServerControl:
        api_key, admin_key = self._keys
        return ServerControl(self._client, url, api_key=api_key, admin_key=admin_key)

    async def _bring_to_policy(self, server: ServerControl) -> None:
        """What a server must pass before it takes requests again. It may be another program than before."""
        relied_on = self.context_tokens
        served = await ask(server, allow_version=self._allow_version)
        if relied_on is not None and (served.context_tokens or relied_on) < relied_on:
            raise ServerUnavailable(
                f"{server.url} has a context of {served.context_tokens} tokens, but the run relies on {relied_on}"
            )
        await self._restore(server)
        if server.url in self._servers:
            self._contexts[server.url] = served.context_tokens


async def _require_nothing(server: ServerControl) -> None:
    """Nothing was published yet: a server that answers is as good as any."""
