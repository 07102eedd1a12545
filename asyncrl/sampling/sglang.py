"""SGLang: the client of one or many sampling servers.

It promises that a request is answered by exactly one server that holds the current policy, or raises; that a cancelled
or repeated request is aborted where it ran; and that a server which was away or is new takes no request before it was
brought to the current policy. Here is where servers come from; what users and publishers do with them is in ``fleet``,
one request in ``exchange``, which server gets it in ``pool``, how long it may take in ``deadlines``, how a server comes
back in ``recovery``. What a server must hold is told by the publisher.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx

from asyncrl.errors import ConfigError
from asyncrl.events import Events
from asyncrl.sampling.backend import Timeouts
from asyncrl.sampling.fleet import Fleet, FleetOptions
from asyncrl.sampling.sources import FixedSource, ServerSource, check_urls, source_of
from asyncrl.sampling.transport import open_client

if TYPE_CHECKING:
    from asyncrl.servers.sglangcommand import LoraConfig, SGLangOptions

__all__ = ["SGLang", "Timeouts"]


class SGLang(Fleet):
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
    ``timeouts``: how many seconds servers are waited for.

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
        self._source = source_of(urls)
        self.may_be_many = self._source.servers != 1
        self.vocab_size = vocab_size
        """Ids from here on are refused when sampling; None: whoever opens it says."""
        self._transport = transport
        options = FleetOptions(
            router_url=None if router is None else check_urls([router], key="sampler.router")[0],
            api_key=api_key,
            admin_key=admin_key,
            retries=retries,
            allow_version=allow_version,
            timeouts=timeouts or Timeouts(),
            starts_servers=self._source.starts_servers,
            seed=seed,
        )
        super().__init__(options)

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

        ``model``: what the learner starts from (its folder, or its name on the Hugging Face hub if it is in the local
        cache), or all options of a server. ``lora``: what is trained, if it is an adapter. ``log_directory``: gets
        what the servers print, None keeps it in temporary files.
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
        if self.is_open:
            raise ConfigError("this SGLang is open already: make another one for what runs beside it")
        async with AsyncExitStack() as stack:
            if events is not None:
                stack.callback(self.events.subscribe(events.emit))
            urls = check_urls(await stack.enter_async_context(self._source.opened()))
            client = await stack.enter_async_context(open_client(self._transport))
            most = vocab_size if self.vocab_size is None else self.vocab_size
            await stack.enter_async_context(self._opened_with(client, urls, self._source, vocab_size=most))
            yield self

    @property
    def urls(self) -> list[str]:
        """All servers that were not removed, whether they take requests or not; if not open, those of its list."""
        if not super().urls and isinstance(self._source, FixedSource):
            return list(self._source.urls)
        return super().urls
