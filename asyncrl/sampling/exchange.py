"""One sampling request to one place: its body, its answer, and its abort if the answer is not wanted or never came."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

import anyio
import httpx
import numpy as np
import orjson

from asyncrl.errors import ConfigError, ProtocolError, RequestRefused, SamplingError, ServerUnavailable
from asyncrl.sampling.aborts import Aborts
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.pool import Pool
from asyncrl.sampling.recovery import described
from asyncrl.sampling.transport import TRANSPORT_ERRORS, was_stale
from asyncrl.sampling.wire import WrongWeights, error_text, generate_body, parse_segment
from asyncrl.types import IntArray, Segment, StopReason

__all__ = ["Exchange", "Front", "Place", "Router"]

_CANCELLED_ABORT_S = 5.0


class Place(Protocol):
    """Where a request goes: a server, or a router in front of servers."""

    url: str

    async def generate(self, body: Mapping[str, object], *, routing_key: str) -> httpx.Response:
        """The raw answer."""
        ...

    async def abort(self, rid: str) -> None:
        """End one request, wherever it runs; never raises for the servers' faults."""
        ...


class Router:
    """A router, reached by ``front``. It knows no aborts, and nobody knows which of ``servers()`` has a request."""

    def __init__(self, front: ServerControl, servers: Callable[[], Iterable[ServerControl]]) -> None:
        self.url = front.url
        self._front = front
        self._servers = servers

    async def generate(self, body: Mapping[str, object], *, routing_key: str) -> httpx.Response:
        """See ``Place``."""
        return await self._front.generate(body, routing_key=quote(routing_key))

    async def abort(self, rid: str) -> None:
        """Abort ``rid`` on every server."""
        async with anyio.create_task_group() as tasks:
            for server in list(self._servers()):
                tasks.start_soon(server.abort, rid)


class Exchange:
    """Makes requests, counted in ``pool``.

    ``suspect(url, reason)`` is told what is odd about a server, ``context_of(url)`` says how many tokens it has room
    for, ``in_place()`` whether weights change under running requests.
    """

    def __init__(
        self,
        pool: Pool,
        aborts: Aborts,
        *,
        suspect: Callable[[str, str], None],
        context_of: Callable[[str], int | None],
        in_place: Callable[[], bool],
        vocab_size: int | None,
    ) -> None:
        self.oldest_anchor = 0
        """Requests on the prefix of an older version do not leave: they come back aborted, without a token."""
        self._pool = pool
        self._aborts = aborts
        self._suspect = suspect
        self._context_of = context_of
        self._in_place = in_place
        self._vocab_size = vocab_size

    async def ask(self, place: Place, request: SegmentRequest) -> Segment | str:
        """The segment, or why another attempt is worth it. Raises ``RequestRefused`` and ``ProtocolError``."""
        started = anyio.current_time()
        try:
            return await self._ask_once(place, request)
        except TRANSPORT_ERRORS as error:
            if not was_stale(error, since=started):
                return self._lost(place, error)
        # That says nothing about the server.
        try:
            return await self._ask_once(place, request)
        except TRANSPORT_ERRORS as error:
            return self._lost(place, error)

    async def _ask_once(self, place: Place, request: SegmentRequest) -> Segment | str:
        # A rid belongs to one attempt: an earlier one may still be live on the server. All have the same length,
        # because an abort may match by prefix.
        rid = uuid.uuid4().hex
        most_tokens = self._room(place.url, request)
        body = generate_body(request, rid=rid, max_new_tokens=most_tokens)
        anchor = request.version if request.anchor is None else request.anchor
        if anchor < self.oldest_anchor:
            return _aborted_at_once()
        try:
            with self._pool.request(place.url, rid, anchor) as scope:
                key = "" if isinstance(place, ServerControl) else request.trajectory_id
                response = await place.generate(body, routing_key=key)
        except TRANSPORT_ERRORS:
            self._aborts.send(place, rid)
            raise
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CANCELLED_ABORT_S):
                await place.abort(rid)
            self._aborts.watch(place, rid)
            raise
        if scope.cancelled_caught:
            self._aborts.send(place, rid)
            return "it was taken out of use"
        if response.status_code >= 500:
            self._aborts.send(place, rid)
            return error_text(response.status_code, response.content)
        return await self._read(place, request, response, most_tokens)

    async def _read(
        self, place: Place, request: SegmentRequest, response: httpx.Response, most_tokens: int
    ) -> Segment | str:
        if response.status_code != 200:
            text = error_text(response.status_code, response.content)
            if await _lost_adapter(place, request.adapter):
                self._suspect(place.url, text)
                return text
            raise RequestRefused(f"{place.url}: {text}")
        try:
            reply = orjson.loads(response.content)
            return parse_segment(
                reply,
                request=request,
                server=_server(place),
                in_place=self._in_place(),
                most_tokens=most_tokens,
                vocab_size=self._vocab_size,
            )
        except WrongWeights as error:
            return self._lost(place, error)
        except (ProtocolError, orjson.JSONDecodeError) as error:
            self._suspect(place.url, described(error))
            raise ProtocolError(f"{place.url}: {error}") from error

    def _lost(self, place: Place, error: Exception) -> str:
        self._suspect(place.url, described(error))
        return described(error)

    def _room(self, url: str, request: SegmentRequest) -> int:
        """What may be asked for: a server refuses, or silently shortens, what goes beyond its context."""
        context = self._context_of(url)
        if context is None:
            return request.max_new_tokens
        room = context - len(request.input_ids)
        if room < 1:
            raise RequestRefused(
                f"{url} has a context of {context} tokens, and {len(request.input_ids)} tokens leave no room in it"
            )
        return min(request.max_new_tokens, room)

    def require_ids(self, ids: IntArray) -> None:
        """Raise ``RequestRefused`` for ids outside of the vocabulary."""
        top = self._vocab_size
        if len(ids) and (ids.min() < 0 or (top is not None and ids.max() >= top)):
            bad = next(int(token) for token in ids if token < 0 or (top is not None and token >= top))
            raise RequestRefused(f"token id {bad} is outside of the vocabulary of {top or 'any'} ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The router that requests go through."""

    router: Router
    pool: Pool
    exchange: Exchange

    async def sample(self, request: SegmentRequest) -> Segment:
        """Once: which server a request ran on is the router's secret, and so is the choice of another one."""
        if request.replica:
            raise ConfigError(
                "sampler.router is set, but requests are pinned to servers of one version, which a router cannot know: "
                "leave the router out"
            )
        outcome = await self.exchange.ask(self.router, request)
        if isinstance(outcome, Segment):
            return outcome
        raise ServerUnavailable(f"{self.router.url}: {outcome}")


async def _lost_adapter(place: Place, adapter: str | None) -> bool:
    """True if a refusal came from a server that was started anew and knows no adapter any more."""
    if adapter is None or not isinstance(place, ServerControl):
        return False
    try:
        return adapter not in await place.adapters()
    except SamplingError:
        return True


def _server(place: Place) -> str:
    """The server's URL for the record; behind a router it is not known."""
    return place.url if isinstance(place, ServerControl) else ""


def _aborted_at_once() -> Segment:
    """What a server answers if an abort comes before the first token: a trajectory asks again."""
    return Segment(
        tokens=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        versions=(),
        stop=StopReason.ABORT,
    )
