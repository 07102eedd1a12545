"""SGLang: the client of one or many sampling servers.

It promises that a request is answered by exactly one server that holds the current policy, or raises; that a cancelled
or repeated request is aborted where it ran; and that a server which was away takes no request before it was brought
back to the current policy. What is on the wire is in ``wire``, how to bring a server back is told by the publisher.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import anyio
import anyio.abc
import httpx
import orjson

from asyncrl.errors import (
    ConfigError,
    ProtocolError,
    PublicationError,
    RequestRefused,
    SamplingError,
    ServerUnavailable,
)
from asyncrl.events import Events, Notice
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.pool import Pool, ServerState
from asyncrl.sampling.transport import TRANSPORT_ERRORS, open_client
from asyncrl.sampling.wire import error_text, generate_body, parse_segment
from asyncrl.types import IntArray, Segment

__all__ = ["Restore", "SGLang", "Timeouts"]

Restore: TypeAlias = Callable[[ServerControl], Awaitable[None]]
"""Brings a server to the current policy, or raises ``SamplingError``, ``PublicationError`` or ``TimeoutError``."""

_CANCELLED_ABORT_S = 5.0
_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 30.0
_DOUBLINGS = 10
# More than the longest needs; a server that is away for a day must not overflow the power.


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the client waits for servers, in seconds. A sampling request has no limit, for a pause may hold it."""

    outage_s: float = 120.0
    """For some server to come back, when none takes requests."""
    publication_s: float = 300.0
    """For one server to take a version, or to give up an adapter."""


class SGLang:
    """Sampling servers that speak SGLang's native HTTP interface.

    ``urls``: the servers themselves, not a router: weights and aborts must reach each of them.
    ``api_key``, ``admin_key``: bearer tokens for sampling and, if the servers have a second one, for control.
    ``transport``: replaces the network, for tests.
    ``retries``: further attempts of a request whose server was lost or overloaded.
    ``vocab_size``: if given, ids outside of it are refused here; some servers do not survive them.
    ``seed``: for the jitter of back-offs.

    What happens to servers is reported as ``Notice`` in ``events``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        retries: int = 3,
        vocab_size: int | None = None,
        seed: int = 0,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.events = Events()
        self.timeouts = timeouts or Timeouts()
        self.in_place_updates = False
        """True if weights change under running requests; the publisher says so."""
        self._urls = _check_urls(urls)
        self._keys = (api_key, admin_key)
        self._transport = transport
        self._retries = retries
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._pool = Pool(self._urls)
        self._restore: Restore = _require_answer
        self._returning: set[str] = set()
        self._client: httpx.AsyncClient
        self._tasks: anyio.abc.TaskGroup
        self._servers: dict[str, ServerControl] = {}

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Self, None]:
        """Connect, and require an answer of every server: raises ``ConfigError`` naming those that give none."""
        api_key, admin_key = self._keys
        async with open_client(self._transport) as client:
            self._client = client
            self._servers = {
                url: ServerControl(client, url, api_key=api_key, admin_key=admin_key) for url in self._urls
            }
            await self._require_servers()
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                yield self
                tasks.cancel_scope.cancel()

    async def sample(self, request: SegmentRequest) -> Segment:
        """Sample one segment; see ``Sampler``."""
        self._require_ids(request.input_ids)
        lost: list[str] = []
        avoid: str | None = None
        while len(lost) <= self._retries:
            if avoid is not None and self._pool.state(avoid) is ServerState.LIVE:
                # It refused for now but is not gone, so it is busy. One that is gone is waited for below.
                await anyio.sleep(self._back_off_s(len(lost)))
            url = await self._pick(request.trajectory_id, avoid)
            outcome = await self._attempt(url, request)
            if isinstance(outcome, Segment):
                return outcome
            lost.append(f"{url}: {outcome}")
            avoid = url
        raise ServerUnavailable(f"no answer in {len(lost)} attempts: {'; '.join(lost)}")

    @property
    def live(self) -> list[ServerControl]:
        """The servers that take requests."""
        return [self._servers[url] for url in self._pool.live]

    async def wait_live(self) -> None:
        """Wait until a server takes requests; raises ``ServerUnavailable`` after ``timeouts.outage_s``."""
        try:
            with anyio.fail_after(self.timeouts.outage_s):
                await self._pool.wait_live()
        except TimeoutError as error:
            raise ServerUnavailable(
                f"none of {', '.join(self._urls)} came back within {self.timeouts.outage_s:g} s"
            ) from error

    def restore_with(self, restore: Restore) -> None:
        """``restore`` must succeed on a server that was away before it takes requests again."""
        self._restore = restore

    def spawn(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``function`` beside everything else, until it ends or the client is closed."""
        self._tasks.start_soon(function)

    def notice(self, name: str, *, level: str = "warning", **keys: object) -> None:
        """Report something about the servers."""
        self.events.emit(Notice(time=anyio.current_time(), name=name, level=level, keys=keys))

    def suspect(self, url: str, reason: str) -> None:
        """Give ``url`` no new request before it was looked at; what runs there goes on."""
        if self._pool.state(url) is ServerState.LIVE:
            self._pool.set_state(url, ServerState.SUSPECT)
            self._bring_back(url, reason)

    def quarantine(self, url: str, reason: str) -> None:
        """Take ``url`` out of use: its requests move to other servers, and it comes back once it could be restored."""
        if self._pool.state(url) is not ServerState.OUT:
            self._pool.set_state(url, ServerState.OUT)
            self.notice("server_quarantined", url=url, reason=reason)
        self._bring_back(url, reason)

    def _bring_back(self, url: str, reason: str) -> None:
        if url not in self._returning:
            self._returning.add(url)
            self._tasks.start_soon(self._return, url, reason)

    async def _return(self, url: str, reason: str) -> None:
        """Restore a server, however often it takes. The only way to learn that a server is back is to ask it."""
        failures = 0
        while True:
            if failures or self._pool.state(url) is ServerState.OUT:
                await anyio.sleep(self._back_off_s(failures + 1))
            try:
                with anyio.fail_after(self.timeouts.publication_s):
                    await self._restore(self._servers[url])
            except (SamplingError, PublicationError, TimeoutError) as error:
                failures += 1
                if failures > 1:
                    self.quarantine(url, f"{reason}; then {_describe(error)}")
            else:
                break
        self._returning.discard(url)
        self._pool.set_state(url, ServerState.LIVE)
        self.notice("server_returned", level="info", url=url, reason=reason)

    async def _pick(self, key: str, avoid: str | None) -> str:
        await self.wait_live()
        return self._pool.pick(key, avoid=avoid)

    async def _attempt(self, url: str, request: SegmentRequest) -> Segment | str:
        """One request to one server: its segment, or why another attempt is worth it."""
        # A rid belongs to one attempt: an earlier one may still be live on the server. All have the same length,
        # because an abort may match by prefix.
        rid = uuid.uuid4().hex
        try:
            with self._pool.request(url) as scope:
                response = await self._servers[url].generate(generate_body(request, rid=rid))
        except TRANSPORT_ERRORS as error:
            self._tasks.start_soon(self._servers[url].abort, rid)
            self.suspect(url, _describe(error))
            return _describe(error)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CANCELLED_ABORT_S):
                await self._servers[url].abort(rid)
            raise
        if scope.cancelled_caught:
            self._tasks.start_soon(self._servers[url].abort, rid)
            return "it was taken out of use"
        if response.status_code >= 500:
            self._tasks.start_soon(self._servers[url].abort, rid)
            return error_text(response.status_code, response.content)
        return await self._read(url, request, response)

    async def _read(self, url: str, request: SegmentRequest, response: httpx.Response) -> Segment | str:
        if response.status_code != 200:
            text = error_text(response.status_code, response.content)
            if request.adapter is not None and await self._lost_adapter(url, request.adapter):
                self.suspect(url, text)
                return text
            raise RequestRefused(f"{url}: {text}")
        try:
            return parse_segment(
                orjson.loads(response.content), request=request, server=url, in_place=self.in_place_updates
            )
        except (ProtocolError, orjson.JSONDecodeError) as error:
            self.suspect(url, _describe(error))
            raise ProtocolError(f"{url}: {error}") from error

    async def _lost_adapter(self, url: str, adapter: str) -> bool:
        """True if a refusal came from a server that was started anew and knows no adapter any more."""
        try:
            return adapter not in await self._servers[url].adapters()
        except SamplingError:
            return True

    async def _require_servers(self) -> None:
        silent: list[str] = []

        async def ask(server: ServerControl) -> None:
            try:
                await server.model_info()
            except SamplingError as error:
                silent.append(f"no server at URL {server.url}: {_describe(error)}")

        async with anyio.create_task_group() as tasks:
            for server in self._servers.values():
                tasks.start_soon(ask, server)
        if silent:
            raise ConfigError("; ".join(sorted(silent)))

    def _require_ids(self, ids: IntArray) -> None:
        top = self._vocab_size
        if len(ids) and (ids.min() < 0 or (top is not None and ids.max() >= top)):
            bad = next(int(token) for token in ids if token < 0 or (top is not None and token >= top))
            raise RequestRefused(f"token id {bad} is outside of the vocabulary of {top or 'any'} ids")

    def _back_off_s(self, failures: int) -> float:
        """Doubles with each failure; the jitter keeps clients that failed together from coming back together."""
        longest_s = min(_FIRST_BACK_OFF_S * 2.0 ** min(failures - 1, _DOUBLINGS), _LONGEST_BACK_OFF_S)
        return longest_s * self._random.uniform(0.5, 1.0)


async def _require_answer(server: ServerControl) -> None:
    """Nothing was published yet: a server that answers is as good as any."""
    await server.model_info()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _check_urls(urls: Sequence[str]) -> tuple[str, ...]:
    if isinstance(urls, str) or not urls:
        raise ConfigError.for_value("sampler.urls", urls, "a list of one or more server URLs")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError.for_value("sampler.urls", url, "a URL that begins with http:// or https://")
    clean = tuple(url.rstrip("/") for url in urls)
    if len(set(clean)) != len(clean):
        raise ConfigError.for_value("sampler.urls", list(urls), "URLs that are all different")
    return clean
