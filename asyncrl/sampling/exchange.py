"""One sampling request to one place: its body, its answer, and its abort if the answer is not wanted or never came."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
import numpy as np
import orjson

from asyncrl.errors import ConfigError, ProtocolError, RequestRefused, SamplingError, ServerUnavailable
from asyncrl.sampling.aborts import Aborts
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.deadlines import work_of
from asyncrl.sampling.held import Interrupted
from asyncrl.sampling.labels import Labels, WrongWeights
from asyncrl.sampling.places import Place, Router
from asyncrl.sampling.pool import Pool, Running, ServerState
from asyncrl.sampling.recovery import described
from asyncrl.sampling.transport import TRANSPORT_ERRORS, Answer, was_stale
from asyncrl.sampling.wire import error_text, generate_body, parse_segment
from asyncrl.types import IntArray, Segment, StopReason

__all__ = ["BehindRouter", "Exchange", "Failed"]

_NOT_NOW = frozenset({408, 425, 429})
# Timeout, too early, too many requests: what routers and proxies before a server say when it is busy. All other 4xx
# are about the request itself and stay true however often it is made.


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An attempt that got no segment; another one may."""

    reason: str
    late: bool = False
    """The place accepted it and did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broken:
    error: Exception
    stale: bool
    """The connection had been closed before the request came to it."""


class Exchange:
    """Makes requests, counted in ``pool``.

    ``suspect(url, reason)`` is told what is odd about a server, ``context_of(url)`` says how many tokens it has room
    for, ``in_place()`` whether weights change under running requests. ``repeated(url, cause)`` is told of every
    further attempt. ``labels``: which weights are ours.
    """

    def __init__(
        self,
        pool: Pool,
        aborts: Aborts,
        *,
        suspect: Callable[[str, str], None],
        context_of: Callable[[str], int | None],
        in_place: Callable[[], bool],
        repeated: Callable[[str, str], None],
        vocab_size: int | None,
        labels: Labels,
    ) -> None:
        self._oldest_anchor = 0
        self._pool = pool
        self._aborts = aborts
        self._suspect = suspect
        self._context_of = context_of
        self._in_place = in_place
        self.repeated = repeated
        self._vocab_size = vocab_size
        self._labels = labels
        self._shunned: dict[str, str] = {}
        # Trajectory -> the server that was late with its last request, until its next one.

    async def ask(self, place: Place, request: SegmentRequest, *, routing_key: str = "") -> Segment | Failed:
        """The segment, or why another attempt is worth it. Raises ``RequestRefused`` and ``ProtocolError``.

        ``WeightsOverwritten`` if somebody else keeps writing to the servers.
        An attempt that failed was aborted when this returns, if its server takes that.
        """
        outcome = await self._attempt(place, request, routing_key)
        if isinstance(outcome, _Broken) and outcome.stale:
            # That says nothing about the server.
            self.repeated(place.url, "stale_connection")
            outcome = await self._attempt(place, request, routing_key)
        if isinstance(outcome, _Broken):
            return self._suspected(place, outcome.error)
        return outcome

    def refuse_older(self, anchor: int) -> None:
        """Requests on the prefix of an older version leave no more: they come back aborted, without a token."""
        self._oldest_anchor = max(self._oldest_anchor, anchor)

    def shunned(self, request: SegmentRequest) -> str | None:
        """The server that was late with the last request of this trajectory, if that was not asked before."""
        return self._shunned.pop(request.trajectory_id, None) if self._shunned else None

    async def _attempt(self, place: Place, request: SegmentRequest, key: str) -> Segment | Failed | _Broken:
        # A rid belongs to one attempt: an earlier one may still be live on the server. All have the same length,
        # because an abort may match by prefix.
        rid = uuid.uuid4().hex
        most_tokens = self._room(place.url, request)
        body = generate_body(request, rid=rid, max_new_tokens=most_tokens)
        anchor = request.version if request.anchor is None else request.anchor
        if anchor < self._oldest_anchor:
            return _aborted_at_once()
        if self._pool.state(place.url) is not ServerState.LIVE:
            return Failed(reason="it takes no requests any more")
        started = anyio.current_time()
        work = work_of(len(request.input_ids), most_tokens)
        holds = self._labels.holds(_server(place))
        answer: Answer | None = None
        trajectory = request.trajectory_id
        with self._pool.request(place, rid, trajectory=trajectory, anchor=anchor, work=work) as running:
            try:
                # Whoever wants its end: it is aborted before its connection is cut.
                answer = await running.held.make(
                    place.generate(body, routing_key=key), partial(self._aborts.begin, place, rid)
                )
            except Interrupted:
                return Failed(reason=_late(running) or "it was taken out of use", late=running.late_s is not None)
            except TRANSPORT_ERRORS as error:
                broken = _Broken(error=error, stale=was_stale(error, since=started))
        if answer is None:
            await self._aborts.abort(place, rid)
            return broken
        try:
            return await self._read(running, request, answer, most_tokens)
        except WrongWeights as error:
            self._labels.report(_server(place), error, since=holds)
            return self._suspected(place, error)

    async def _read(
        self, running: Running, request: SegmentRequest, answer: Answer, most_tokens: int
    ) -> Segment | Failed:
        if answer.status == 200:
            return self._answered(running, request, answer, most_tokens)
        place, text = running.place, error_text(answer.status, answer.content)
        if answer.status >= 500 or answer.status in _NOT_NOW:
            await self._aborts.abort(place, running.rid)
            return Failed(reason=text)
        if await _lost_adapter(place, request.adapter):
            self._suspect(place.url, text)
            return Failed(reason=text)
        raise RequestRefused(f"{place.url}: {text}")

    def _answered(
        self, running: Running, request: SegmentRequest, answer: Answer, most_tokens: int
    ) -> Segment | Failed:
        place = running.place
        try:
            reply = orjson.loads(answer.content)
            segment = parse_segment(
                reply,
                request=request,
                server=_server(place),
                in_place=self._in_place(),
                most_tokens=most_tokens,
                vocab_size=self._vocab_size,
                labels=self._labels,
            )
        except WrongWeights:
            raise  # a sound reply, and a matter of its own
        except (ProtocolError, orjson.JSONDecodeError) as error:
            self._suspect(place.url, described(error))
            raise ProtocolError(f"{place.url}: {error}") from error
        tokens = len(segment.tokens)
        if segment.stop is not StopReason.ABORT:
            if tokens:
                self._pool.pace(place.url).saw(running.age_s, work_of(len(request.input_ids), tokens))
        elif running.late_s is not None:
            if not tokens:
                return Failed(reason=_late(running), late=True)
            self._shunned[request.trajectory_id] = place.url
            self.repeated(place.url, "late")
        return segment

    def _suspected(self, place: Place, error: Exception) -> Failed:
        self._suspect(place.url, described(error))
        return Failed(reason=described(error))

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
class BehindRouter:
    """Sampling through a router. ``retries``: further attempts of a request that it did not answer."""

    router: Router
    exchange: Exchange
    retries: int

    async def sample(self, request: SegmentRequest) -> Segment:
        """Sample through the router, which does not tell which server has a request, nor lets another be chosen.

        So there is one attempt, except for a request that is never answered: with another key the router takes it to
        another server.
        """
        if request.replica:
            raise ConfigError(
                "sampler.router is set, but requests are pinned to servers of one version, which a router cannot know: "
                "leave the router out"
            )
        key = request.trajectory_id
        if self.exchange.shunned(request) is not None:
            key += "~"
        reasons: list[str] = []
        while True:
            outcome = await self.exchange.ask(self.router, request, routing_key=key)
            if isinstance(outcome, Segment):
                return outcome
            reasons.append(outcome.reason)
            if not outcome.late or len(reasons) > self.retries:
                break
            self.exchange.repeated(self.router.url, "late")
            key += "~"
        raise ServerUnavailable(f"{self.router.url}: {'; '.join(reasons)}")


def _late(running: Running) -> str:
    return "" if running.late_s is None else f"it did not answer within {running.late_s:.0f} s"


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
