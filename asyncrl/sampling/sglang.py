"""SGLang: the client of one or many sampling servers.

It promises that a request is answered by exactly one server that holds the current policy, or raises; that a cancelled
or repeated request is aborted where it ran; and that a server which was away or is new takes no request before it was
brought to the current policy. Here is what users and publishers see; the servers themselves are in ``fleet``, one
request in ``exchange``, which server gets it in ``pool``, how long it may take in ``deadlines``, how a server comes
back in ``recovery``. What a server must hold is told by the publisher.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio
import httpx

from asyncrl.errors import ConfigError
from asyncrl.events import Events, Notice, RequestRepeated
from asyncrl.sampling.backend import SamplingBackend
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.fleet import Fleet, FleetOptions, Timeouts
from asyncrl.sampling.labels import Labels, Writer
from asyncrl.sampling.recovery import Restore
from asyncrl.sampling.sources import ChangingSource, FixedSource, ServerSource, check_urls, follow, source_of
from asyncrl.sampling.transport import open_client
from asyncrl.types import Segment

if TYPE_CHECKING:
    from asyncrl.servers.sglangcommand import LoraConfig, SGLangOptions

__all__ = ["Restore", "SGLang", "Timeouts"]


class SGLang(SamplingBackend):
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
        self.labels = Labels()
        """Which weights on the servers are ours; the publisher claims them."""
        self.timeouts = timeouts or Timeouts()
        self.in_place_updates = False
        """True if weights change under running requests; the publisher says so when it claims the servers."""
        self.fleet = self
        self.opens_connections = True
        self._source = source_of(urls)
        self.may_be_many = self._source.servers != 1
        self.starts_servers = self._source.starts_servers
        self._transport = transport
        self._options = FleetOptions(
            router_url=None if router is None else check_urls([router], key="sampler.router")[0],
            api_key=api_key,
            admin_key=admin_key,
            retries=retries,
            vocab_size=vocab_size,
            allow_version=allow_version,
            timeouts=self.timeouts,
            seed=seed,
        )
        self._restore: Restore = _require_nothing
        self._fleet: Fleet | None = None

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
        from asyncrl.servers.sglangcommand import SGLangOptions
        from asyncrl.servers.sglangserver import LaunchedServers

        options = model if isinstance(model, SGLangOptions) else SGLangOptions(model=Path(model))
        if lora is not None:
            options = replace(options, lora=lora)
        source = LaunchedServers(options, servers=servers, log_directory=log_directory)
        sampler = cls(
            source,
            api_key=options.api_key,
            admin_key=options.admin_key,
            vocab_size=source.vocab_size,
            allow_version=options.allow_version,
            # As long as a server that died may need to come back.
            timeouts=Timeouts(outage_s=options.start_timeout_s),
        )
        source.events.subscribe(sampler.events.emit)
        return sampler

    @classmethod
    def embedded(cls, model: Path, *, threads: int = 1) -> Self:
        """The embedded server for the model folder ``model``, which starts when this is opened and ends with it.

        ``threads``: of torch in its process.
        """
        from asyncrl.servers.launch import EmbeddedServer

        return cls(EmbeddedServer(model, threads=threads))

    @property
    def vocab_size(self) -> int | None:
        """Ids from here on are refused when sampling; None: whoever opens it says."""
        return self._options.vocab_size

    @asynccontextmanager
    async def opened(
        self, *, vocab_size: int | None = None, events: Events | None = None
    ) -> AsyncGenerator[Self, None]:
        """Connect, and require an answer of every server: raises ``ConfigError`` naming those that give none.

        ``vocab_size``: if it was not made with another. ``events`` get what happens to servers while it is open.
        One at a time. Before and after, it has the servers of its list and nothing else.
        """
        if self._fleet is not None:
            raise ConfigError("this SGLang is open already: make another one for what runs beside it")
        options = self._options if self.vocab_size is not None else replace(self._options, vocab_size=vocab_size)
        async with AsyncExitStack() as stack:
            if events is not None:
                stack.callback(self.events.subscribe(events.emit))
            urls = check_urls(await stack.enter_async_context(self._source.opened()))
            client = await stack.enter_async_context(open_client(self._transport))
            fleet = Fleet(client, options, self)
            await fleet.require(urls)
            try:
                async with anyio.create_task_group() as tasks:
                    fleet.start(tasks)
                    self._fleet = fleet
                    if isinstance(self._source, ChangingSource):
                        tasks.start_soon(follow, self._source, self)
                    yield self
                    tasks.cancel_scope.cancel()
            finally:
                # Not before everything in the background has ended: until then it may need its servers.
                self._fleet = None

    async def sample(self, request: SegmentRequest) -> Segment:
        """Sample one segment; see ``Sampler``."""
        return await self._open("sample").sample(request)

    @property
    def live(self) -> list[ServerControl]:
        """The servers that take requests; none if it is not open."""
        return [] if self._fleet is None else self._fleet.live

    @property
    def urls(self) -> list[str]:
        """All servers that were not removed, whether they take requests or not; if not open, those of its list."""
        if self._fleet is None:
            return list(self._source.urls) if isinstance(self._source, FixedSource) else []
        return self._fleet.pool.staying

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of prompt and output together that every server takes; None if no server says."""
        return None if self._fleet is None else self._fleet.context_tokens

    async def wait_live(self, version: int | None = None) -> None:
        """Wait until a server takes requests, or requests that need base weights of ``version``.

        Raises ``ServerUnavailable`` after ``timeouts.outage_s``.
        """
        await self._open("wait_live").wait_live(version)

    def add(self, url: str) -> None:
        """Take another server into use, as soon as it was brought to the current policy."""
        self._open("add").add(url)

    def remove(self, url: str, *, now: bool = False) -> None:
        """Give a server no new requests and forget it when it has none. ``now``: those that it has move elsewhere."""
        self._open("remove").remove(url, now=now)

    @property
    def versions(self) -> dict[str, int | None]:
        """The version of the base weights of each server that takes requests; None: not known, or being changed."""
        return {} if self._fleet is None else {url: self._fleet.pool.version(url) for url in self._fleet.pool.live}

    def serving(self, url: str, version: int | None) -> None:
        """The publisher says: the base weights of ``url`` are ``version``. Forgotten when the server goes out."""
        if self._fleet is not None:
            self._fleet.pool.set_version(url, version)

    def server_of(self, trajectory: str) -> str | None:
        """The server, or the router, that has a request of ``trajectory`` now; for messages."""
        return None if self._fleet is None else self._fleet.server_of(trajectory)

    def oldest_call(self) -> tuple[float, str] | None:
        """Since when the oldest control call is under way, and its URL; for messages."""
        return None if self._fleet is None else self._fleet.oldest_call()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``, about who takes requests and of which version, holds."""
        await self._open("wait_until").pool.changed.wait_until(condition)

    async def vacate(self, url: str) -> None:
        """Abort all our requests on ``url`` and wait until they were answered, as ``abort_older`` does."""
        await self._open("vacate").vacate(url)

    async def abort_older(self, url: str, anchor: int) -> None:
        """Abort our requests on ``url`` whose prefix is older than ``anchor``, and wait until they were answered.

        From now on no such request leaves for any server: it comes back aborted, without a token. One that is not
        answered within half a minute is taken away and comes back in the same way. With a router nobody knows what runs
        where: they are aborted, and not waited for.
        """
        await self._open("abort_older").abort_older(url, anchor)

    def on_capacity(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call ``callback`` with how many requests the servers should have at once: now and after each change.

        Requests beyond it wait in servers and grow old there. Returns what ends the subscription.
        """
        return self._open("on_capacity").pool.on_capacity(callback)

    def claim(self, writer: Writer | None, restore: Restore, *, in_place: bool = False) -> None:
        """Called once by each publisher: the servers have weights of ``writer`` from now on (None: plain numbers).

        ``restore`` must succeed on a server that is new or was away before it takes requests. ``in_place``: weights
        change under running requests.
        """
        self.labels.claim(writer)
        self._restore = restore
        self.in_place_updates = in_place

    async def restore(self, server: ServerControl) -> None:
        """Bring ``server`` to the current policy, as the publisher does it."""
        await self._restore(server)

    def spawn(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``function`` beside everything else, until it ends or the client is closed."""
        self._open("spawn").spawn(function)

    def notice(self, name: str, *, level: str = "warning", **keys: object) -> None:
        """Report something about the servers."""
        self.events.emit(Notice(time=anyio.current_time(), name=name, level=level, keys=keys))

    def repeated(self, url: str, cause: str) -> None:
        """Report that a request is asked again, of ``url``."""
        self.events.emit(RequestRepeated(time=anyio.current_time(), url=url, cause=cause))

    def suspect(self, url: str, reason: str) -> None:
        """Give ``url`` no new request before it was looked at; what runs there goes on."""
        if self._fleet is not None:
            self._fleet.suspect(url, reason)

    def quarantine(self, url: str, reason: str) -> None:
        """Take ``url`` out of use: its requests move to other servers, and it comes back once it could be restored."""
        if self._fleet is not None:
            self._fleet.quarantine(url, reason)

    def _open(self, name: str) -> Fleet:
        if self._fleet is None:
            raise ConfigError(
                f"SGLang.{name} needs open servers, and this one is not open: use it inside "
                "`async with sampler.opened()`, or while a run uses it"
            )
        return self._fleet


async def _require_nothing(server: ServerControl) -> None:
    """Nothing was published yet: a server that answers is as good as any."""
