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
from typing import Any, TypeVar

import anyio
import torch

from asyncrl.concurrency.notifier import Notifier
from asyncrl.concurrency.worker import Worker
from asyncrl.sampling.wire import PauseMode
from asyncrl.servers.adapters import Adapters
from asyncrl.servers.embedded.engine import Engine
from asyncrl.servers.embedded.model import Adapter
from asyncrl.servers.embedded.request import Request
from asyncrl.servers.embedded.throughput import Throughput
from asyncrl.servers.wireserver import (
    ABORTED_WAITING,
    GenerateRequest,
    WireError,
    allowed_new_tokens,
    bad_value,
    generate_reply,
    longest_prompt,
    update_error,
)

__all__ = ["Service"]

T = TypeVar("T")
_STEPS = 16
# Steps in a row without a look at the event loop, if nobody waits for one: the way to the thread and back costs more
# than a step of a tiny model.


class Service:
    """What the routes talk to. ``context_length`` bounds prompt and output together."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        worker: Worker,
        model_path: Path,
        context_length: int,
        eos: frozenset[int],
    ) -> None:
        self.engine = engine
        self.model_path = model_path
        """Folder of the weights that are loaded."""
        self.label = engine.label
        """Of the last update that succeeded; the engine has another one after an update that could not flush."""
        self.context_length = context_length
        self.paused = False
        self.adapters = Adapters(self._read_adapter)
        self._tokenizer = tokenizer
        self._tokenizer_path = str(model_path)
        self._worker = worker
        self._eos = eos
        self._arrived: deque[Request] = deque()
        self._live: dict[str, tuple[Request, anyio.Event]] = {}
        self._computing = 0
        self._updating = False
        self._wanted = 0
        # Callers that wait for the time between two steps.
        self._between_steps = anyio.Lock()
        self._one_update = anyio.Lock()
        self._changed = Notifier()
        self._throughput = Throughput()

    @property
    def load(self) -> tuple[int, int]:
        """Running and waiting requests."""
        running = len(self.engine.running)
        return running, self._computing - running + len(self._arrived)

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
                    self.engine.waiting.extend(self._arrived)
                    self._arrived.clear()
                with self._throughput.measured(self.engine):
                    ended = await self._worker.run(self._steps)
                self._leave(ended)

    async def generate(self, wire: GenerateRequest) -> dict[str, Any]:
        """Serve one request. Cancelling it aborts it."""
        allowed = self._check(wire)
        adapter = None if wire.lora_path is None else await self.adapters.named(wire.lora_path)
        if wire.rid in self._live:
            raise bad_value(f"Duplicate request ID detected: {wire.rid}")
        request = Request(
            wire=wire,
            adapter=adapter,
            max_new_tokens=allowed,
            stop_ids=frozenset() if wire.ignore_eos else self._eos | frozenset(wire.stop_token_ids),
            tokens=array("q", wire.input_ids),
        )
        done = anyio.Event()
        self._live[wire.rid] = (request, done)
        if adapter is not None:
            adapter.users += 1
        self._arrived.append(request)
        self._changed.notify()
        try:
            await done.wait()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self.abort(wire.rid)
            raise
        finally:
            del self._live[wire.rid]
            if adapter is not None:
                self.adapters.end_use(adapter)
        if request.failure:
            raise WireError(500, {"error": {"message": f"the request could not be computed: {request.failure}"}})
        return self._reply(request)

    async def abort(self, rid: str) -> None:
        """End one request with what it has; it answers its caller."""
        await self._abort(lambda request: request.wire.rid == rid, lambda: self.engine.abort(rid))

    async def abort_all(self) -> None:
        """End every request with what it has."""
        await self._abort(lambda request: True, self.engine.abort_all)

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping; when this returns nothing runs. New requests wait."""
        self.paused = True
        if mode == "abort":
            await self.abort_all()
        else:
            await self._control(self.engine.retract_all if mode == "retract" else lambda: None)

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        self._changed.notify()

    async def flush(self) -> bool:
        """Forget cached prefixes; False, and nothing happens, while requests run or, not paused, wait."""
        return await self._control(lambda: self.engine.flush(ignore_waiting=self.paused))

    @asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[None, None]:
        """At once if paused; else after the requests that run, and new ones wait."""
        if self.paused:
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

    async def update_weights(
        self, weights: Path | Mapping[str, torch.Tensor], label: str | None, *, flush: bool, abort_all: bool
    ) -> None:
        """Replace all weights by those of a folder, or some by name; see ``exclusive``.

        If the flush is refused the weights are replaced all the same, as in SGLang.
        """
        if abort_all:
            await self.abort_all()
        try:
            async with self.exclusive():
                await self._control(lambda: self.engine.load_weights(weights, label))
                flushed = not flush or await self.flush()
        except (OSError, ValueError) as error:
            raise update_error(f"Failed to update weights: {error}") from error
        if not flushed:
            raise update_error(
                "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                "Retract or finish them, then call /flush_cache."
            )
        if isinstance(weights, Path):
            self.model_path = weights
        self.label = self.label if label is None else label

    async def relabel(self, label: str) -> None:
        """Give the weights that are loaded another label; tokens that follow carry it."""
        await self._control(lambda: self.engine.relabel(label))
        self.label = label

    async def checksums(self) -> dict[str, str]:
        """A digest of each weight."""
        return await self._control(self.engine.model.checksums)

    async def load_adapter_from_tensors(self, name: str, payloads: Sequence[object]) -> None:
        """Refused with ``WireError``."""
        raise self.adapters.refusal(name, "because this server never unpickles what it is sent; load it from disk")

    def model_details(self) -> dict[str, Any]:
        """What ``/model_info`` says of the kind of model."""
        config = self.engine.model.config
        kind = {"model_type": config.model_type, "architectures": config.architectures}
        return {"tokenizer_path": self._tokenizer_path} | kind

    def server_details(self) -> dict[str, Any]:
        """Sizes, in tokens and requests."""
        return {
            "max_total_num_tokens": self.engine.model.slots,
            "max_running_requests": self.engine.max_running_requests,
            "max_req_input_len": longest_prompt(self.context_length, self.engine.model.slots),
        }

    def load_details(self) -> dict[str, Any]:
        """What the KV pool holds."""
        slots, used = self.engine.cache.slots, self.engine.cache.slots - self.engine.cache.free
        sizes = {"max_total_num_tokens": slots, "max_running_requests": self.engine.max_running_requests}
        return {"num_used_tokens": used, "token_usage": used / slots} | sizes

    async def _read_adapter(self, name: str, path: Path) -> Adapter:
        return await self._worker.run(self.engine.model.load_adapter, name, path)

    def _check(self, wire: GenerateRequest) -> int:
        """How many tokens the request gets."""
        vocabulary = self.engine.model.config.vocab_size
        if min(wire.input_ids) < 0 or max(wire.input_ids) >= vocabulary:
            raise bad_value(f"input_ids has an id outside of the vocabulary of {vocabulary}")
        return allowed_new_tokens(wire, context_length=self.context_length, kv_tokens=self.engine.model.slots)

    def _has_work(self) -> bool:
        return not self.paused and (self._computing > 0 or (bool(self._arrived) and not self._updating))

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
            request.finish_reason = dict(ABORTED_WAITING)
        self._answer(never_started)
        self._leave(await self._control(operation))

    def _leave(self, ended: list[Request]) -> None:
        self._computing -= len(ended)
        self._answer(ended)

    def _answer(self, ended: list[Request]) -> None:
        for request in ended:
            self._live[request.wire.rid][1].set()
        self._changed.notify()

    def _reply(self, request: Request) -> dict[str, Any]:
        assert request.finish_reason is not None
        output = request.tokens[request.prompt_tokens :].tolist()
        return generate_reply(
            request.wire,
            text=self._text(request.wire, output, request.finish_reason.get("matched")),
            output_ids=output,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            finish_reason=request.finish_reason,
            weight_version=self.engine.label,
            versions=request.versions,
            cached_tokens=request.cached_tokens,
            retractions=request.retractions,
        )

    def _text(self, wire: GenerateRequest, output: list[int], matched: int | str | None) -> str:
        """The output as text, without what ended it unless the request keeps that."""
        trimmed = not wire.no_stop_trim
        shown = output[:-1] if trimmed and isinstance(matched, int) else output
        text = str(self._tokenizer.decode(shown, skip_special_tokens=wire.skip_special_tokens))
        return text.partition(matched)[0] if trimmed and isinstance(matched, str) else text
