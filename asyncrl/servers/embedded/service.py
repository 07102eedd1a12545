"""The engine's life on the event loop: requests in, replies out, and control operations between two steps.

Steps run in one worker thread. Whatever else touches the engine holds ``_between_steps``, so it never sees half a
step. New requests only go through ``_arrived``, which the loop empties before a step: while the engine is paused or
its weights are being replaced, they wait there. ``_computing`` counts the requests that the engine has, because its
own lists change while it steps.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import anyio
import anyio.to_thread
import torch

from asyncrl.concurrency.notifier import Notifier
from asyncrl.concurrency.worker import Worker
from asyncrl.sampling.replies import shown
from asyncrl.sampling.wire import PauseMode
from asyncrl.servers.adapters import Adapters, AdapterSource
from asyncrl.servers.backend import Broadcast, GroupPlace
from asyncrl.servers.embedded.engine import Engine
from asyncrl.servers.embedded.group import ReceivingGroup
from asyncrl.servers.embedded.model import Adapter
from asyncrl.servers.embedded.request import Request
from asyncrl.servers.embedded.throughput import Throughput
from asyncrl.servers.generation import ABORTED_WAITING
from asyncrl.servers.wireserver import GenerateRequest, ServerLimits, WireError, bad_value, update_error

__all__ = ["Service"]

T = TypeVar("T")
_STEPS = 16
# Steps in a row without a look at the event loop, if nobody waits for one: the way to the thread and back costs more
# than a step of a tiny model.
_DTYPES = ("float32", "bfloat16", "float16")
_WITHIN_S = 120.0
# For the other ranks of a group to join, and for a broadcast to arrive.
_NO_PICKLES = "this server never unpickles what it is sent"


class Service:
    """The ``Backend`` that computes. ``eos``: ids that end a request that does not ignore them."""

    def __init__(
        self, engine: Engine, tokenizer: Any, *, worker: Worker, limits: ServerLimits, eos: frozenset[int]
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.paused: PauseMode | None = None
        self.adapters: Adapters[Adapter] = Adapters(self._read_adapter)
        self._tokenizer = tokenizer
        self._worker = worker
        self._eos = eos
        self._arrived: deque[Request] = deque()
        self._live: dict[str, Request] = {}
        self._computing = 0
        self._updating = False
        self._wanted = 0
        # Callers that wait for the time between two steps.
        self._between_steps = anyio.Lock()
        self._one_update = anyio.Lock()
        self._changed = Notifier()
        self._throughput = Throughput()
        # A thread for each group that is waited for, and one more so that a dead trainer does not block the next one.
        self._limiter = anyio.CapacityLimiter(4)

    @property
    def load(self) -> tuple[int, int]:
        """Running and waiting requests."""
        running = len(self.engine.running)
        return running, self._computing - running + len(self._arrived)

    @property
    def used_tokens(self) -> int:
        """Of the KV pool."""
        return self.engine.cache.slots - self.engine.cache.free

    @property
    def tokens_per_second(self) -> float:
        """Of all running requests, by the last steps; nothing if none runs."""
        return self._throughput.now if self.engine.running else 0.0

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await self._changed.wait_until(self._has_work)
            async with self._between_steps:
                if not self._updating:
                    self._computing += len(self._arrived)
                    self.engine.add(self._arrived)
                    self._arrived.clear()
                with self._throughput.measured(self.engine):
                    ended = await self._worker.run(self._steps)
                self._leave(ended)

    async def generate(self, wire: GenerateRequest) -> dict[str, Any]:
        """Serve one request. Cancelling it aborts it."""
        allowed = self.limits.allowed_new_tokens(wire)
        async with self.adapters.using(wire.lora_path) as adapter:
            if wire.rid in self._live:
                raise bad_value(f"Duplicate request ID detected: {wire.rid}")
            request = Request(
                wire=wire,
                adapter=adapter,
                max_new_tokens=allowed,
                stop_ids=frozenset() if wire.ignore_eos else self._eos | frozenset(wire.stop_token_ids),
                tokens=array("q", wire.input_ids),
            )
            self._live[wire.rid] = request
            self._arrived.append(request)
            self._changed.notify()
            try:
                await request.done.wait()
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True):
                    await self.abort(wire.rid)
                raise
            finally:
                del self._live[wire.rid]
        if request.failure:
            raise WireError(500, {"error": {"message": f"the request could not be computed: {request.failure}"}})
        return request.reply(
            label=self.engine.label,
            decode=lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=wire.skip_special_tokens)),
        )

    async def abort(self, rid: str) -> None:
        """End one request with what it has; it answers its caller."""
        await self._abort(lambda request: request.wire.rid == rid, lambda: self.engine.abort(rid))

    async def abort_all(self) -> None:
        """End every request with what it has."""
        await self._abort(lambda request: True, self.engine.abort_all)

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping; when this returns nothing runs. New requests wait."""
        self.paused = mode
        if mode == "abort":
            await self.abort_all()
        else:
            await self._control(self.engine.retract_all if mode == "retract" else lambda: None)

    def resume(self) -> None:
        """Go on."""
        self.paused = None
        self._changed.notify()

    async def flush(self) -> bool:
        """Forget cached prefixes; False, and nothing happens, while requests run or, not paused, wait."""
        return await self._control(lambda: self.engine.flush(ignore_waiting=self.paused is not None))

    @asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[None, None]:
        """At once if paused; else after the requests that run, and new ones wait."""
        if self.paused is not None:
            yield
            return
        async with self._one_update:
            self._updating = True
            try:
                await self._changed.wait_until(lambda: not self._computing)
                yield
            finally:
                self._updating = False
                self._changed.notify()

    async def update(self, weights: Path | Mapping[str, torch.Tensor] | None, label: str | None) -> None:
        """Replace all weights by those of a folder, or some by name, and their label; tokens that follow carry it."""
        await self._control(lambda: self.engine.load_weights(weights, label))

    def unpacked(self, payloads: Sequence[bytes]) -> NoReturn:
        """Reading them would mean unpickling."""
        raise update_error(f"{_NO_PICKLES}: update from disk or by broadcast")

    async def join(self, place: GroupPlace) -> ReceivingGroup:
        """A group, once every rank has joined it."""
        failed = "Failed to initialize custom process group"
        if place.backend != "gloo":
            raise update_error(f"{failed}: backend {shown(place.backend)}, this server has gloo")
        return await self._waiting(lambda: ReceivingGroup(place, timeout_s=_WITHIN_S), failed)

    async def receive(self, group: ReceivingGroup, broadcast: Broadcast) -> dict[str, torch.Tensor]:
        """What rank 0 broadcasts; nobody waits for what could not be used."""
        failed = "Failed to receive weights"
        known = self.engine.model.shapes()
        for name, dtype, shape in zip(broadcast.names, broadcast.dtypes, broadcast.shapes, strict=True):
            if type(name) is not str or known.get(name) != shape:
                raise update_error(
                    f"{failed}: names and shapes have {shown(name)} of {shown(shape)}, which is no "
                    "weight of the model that is served"
                )
            if dtype not in _DTYPES:
                raise update_error(f"{failed}: dtypes has {shown(dtype)}, but must have {', '.join(_DTYPES)}")
        return await self._waiting(lambda: group.receive(broadcast), failed)

    async def checksums(self) -> dict[str, str]:
        """A digest of each weight."""
        return await self._control(self.engine.model.checksums)

    async def _read_adapter(self, source: AdapterSource) -> Adapter:
        if not isinstance(source, str):
            raise ValueError(f"{_NO_PICKLES}; load it from disk")
        return await self._worker.run(self.engine.model.load_adapter, Path(source))

    async def _waiting(self, operation: Callable[[], T], failed: str) -> T:
        """Run what waits for other ranks in a thread of its own."""
        try:
            return await anyio.to_thread.run_sync(operation, limiter=self._limiter, abandon_on_cancel=True)
        except (RuntimeError, ValueError) as error:
            raise update_error(f"{failed}: {error}") from error

    def _has_work(self) -> bool:
        return self.paused is None and (self._computing > 0 or (bool(self._arrived) and not self._updating))

    def _steps(self) -> list[Request]:
        """Some steps, until a request ends or somebody wants the time between two."""
        for _ in range(_STEPS):
            if self.engine.idle:
                break
            try:
                ended = self.engine.step()
            except Exception as error:
                ended = self.engine.recover(error)
                if not ended and self.engine.idle:
                    raise
            if ended or self._wanted or self._arrived:
                return ended
        return []

    async def _control(self, operation: Callable[[], T]) -> T:
        """Run ``operation`` in the worker, between two steps."""
        self._wanted += 1
        try:
            async with self._between_steps:
                return await self._worker.run(operation)
        finally:
            self._wanted -= 1
            self._changed.notify()

    async def _abort(self, chosen: Callable[[Request], bool], operation: Callable[[], list[Request]]) -> None:
        never_started = [request for request in self._arrived if chosen(request)]
        for request in never_started:
            self._arrived.remove(request)
            request.finish_reason = ABORTED_WAITING
        self._answer(never_started)
        self._leave(await self._control(operation))

    def _leave(self, ended: list[Request]) -> None:
        self._computing -= len(ended)
        self._answer(ended)

    def _answer(self, ended: list[Request]) -> None:
        for request in ended:
            request.done.set()
        self._changed.notify()
