"""SGLang: the client of one or many sampling servers.

It promises that a request is answered by exactly one server that holds the current policy, or raises; that a cancelled
or repeated request is aborted where it ran; and that a server which was away or is new takes no request before it was
brought to the current policy. Here is what users see; the servers themselves, and what publishers do with them, are in
``fleet``, one request in ``exchange``, which server gets it in ``pool``, how long it may take in ``deadlines``, how a
server comes back in ``recovery``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx

from asyncrl.errors import ConfigError
from asyncrl.events import Events
from asyncrl.sampling.backend import SamplingBackend, Timeouts
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.fleet import Fleet, FleetOptions
from asyncrl.sampling.sources import FixedSource, ServerSource, check_urls, source_of
from asyncrl.sampling.transport import open_client
from asyncrl.types import Segment

if TYPE_CHECKING:
    from asyncrl.servers.sglangcommand import LoraConfig, SGLangOptions

__all__ = ["SGLang", "Timeouts"]


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
        self.timeouts = timeouts or Timeouts()
        self.opens_connections = True
        self._source = source_of(urls)
        self.may_be_many = self._source.servers != 1
        self.starts_servers = self._source.starts_servers
        self.vocab_size = vocab_size
        """Ids from here on are refused when sampling; None: whoever opens it says."""
        self._transport = transport
        options = FleetOptions(
            router_url=None if router is None else check_urls([router], key="sampler.router")[0],
            api_key=api_key,
            admin_key=admin_key,
            retries=retries,
            allow_version=allow_version,
            timeouts=self.timeouts,
            starts_servers=self.starts_servers,
            seed=seed,
        )
        self.fleet: Fleet = Fleet(options, self.events)

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

    @asynccontextmanager
    async def opened(
        self, *, vocab_size: int | None = None, events: Events | None = None
    ) -> AsyncGenerator[Self, None]:
        """Connect, and require an answer of every server: raises ``ConfigError`` naming those that give none.

        ``vocab_size``: if it was not made with another. ``events`` get what happens to servers while it is open.
        One at a time. Before and after, it has the servers of its list and nothing else.
        """
        if self.fleet.is_open:
            raise ConfigError("this SGLang is open already: make another one for what runs beside it")
        async with AsyncExitStack() as stack:
            if events is not None:
                stack.callback(self.events.subscribe(events.emit))
            urls = check_urls(await stack.enter_async_context(self._source.opened()))
            client = await stack.enter_async_context(open_client(self._transport))
            most = vocab_size if self.vocab_size is None else self.vocab_size
            await stack.enter_async_context(self.fleet.opened(client, urls, self._source, vocab_size=most))
            yield self

    async def sample(self, request: SegmentRequest) -> Segment:
        """Sample one segment; see ``Sampler``."""
        return await self.fleet.sample(request)

    @property
    def live(self) -> list[ServerControl]:
        """The servers that take requests; none if it is not open."""
        return self.fleet.live

    @property
    def urls(self) -> list[str]:
        """All servers that were not removed, whether they take requests or not; if not open, those of its list."""
        if not self.fleet.urls and isinstance(self._source, FixedSource):
            return list(self._source.urls)
        return self.fleet.urls

    async def wait_live(self) -> None:
        """Wait until a server takes requests. Raises ``ServerUnavailable`` after ``timeouts.outage_s``."""
        await self.fleet.wait_live()

    def add(self, url: str) -> None:
        """Take another server into use, as soon as it was brought to the current policy."""
        self.fleet.add(url)

    def remove(self, url: str, *, now: bool = False) -> None:
        """Give a server no new requests and forget it when it has none. ``now``: those that it has move elsewhere."""
        self.fleet.remove(url, now=now)

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of prompt and output together that every server takes; None if no server says."""
        return self.fleet.context_tokens

    def on_capacity(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call ``callback`` with how many requests the servers should have at once: now and after each change.

        Requests beyond it wait in servers and grow old there. Returns what ends the subscription.
        """
        return self.fleet.on_capacity(callback)

    def server_of(self, trajectory: str) -> str | None:
        """The server, or the router, that has a request of ``trajectory`` now; for messages."""
        return self.fleet.server_of(trajectory)

    def oldest_call(self) -> tuple[float, str] | None:
        """Since when the oldest control call is under way, and its URL; for messages."""
        return self.fleet.oldest_call()
