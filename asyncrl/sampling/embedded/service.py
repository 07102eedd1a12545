"""The engine's life on the event loop: requests in, replies out, and control operations between two steps.

Steps run in one worker thread. Whatever else touches the engine holds ``_between_steps``, so it never sees half a
step. New requests only go through ``_arrived``, which the loop empties before a step: while the engine is paused or
its weights are being replaced, they wait there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import anyio
import torch

from asyncrl.learning.worker import Worker
from asyncrl.sampling.embedded.engine import Engine, PauseMode
from asyncrl.sampling.embedded.model import load_adapter
from asyncrl.sampling.embedded.request import LoadedAdapter, Request
from asyncrl.sampling.wire import GenerateRequest, WireError, bad_value, generate_reply
from asyncrl.scheduling.pulse import Pulse

__all__ = ["Service"]

T = TypeVar("T")
_STEPS = 16
# Steps in a row without a look at the event loop, if nobody waits for one: the way to the thread and back costs more
# than a step of a tiny model.


class Service:
    """What the routes talk to. ``context_length`` bounds prompt and output together."""

    def __init__(
        self, engine: Engine, tokenizer: Any, *, worker: Worker, context_length: int, eos: frozenset[int]
    ) -> None:
        self.engine = engine
        self.paused = False
        self.adapters: dict[str, LoadedAdapter] = {}
        self._tokenizer = tokenizer
        self._worker = worker
        self._context_length = context_length
        self._eos = eos
        self._known_paths: dict[str, str] = {}
        # Every adapter ever loaded: a request that names an unloaded one loads it again, as in SGLang.
        self._uids = count(1)
        self._arrived: deque[Request] = deque()
        self._live: dict[str, tuple[Request, anyio.Event]] = {}
        self._updating = False
        self._wanted = 0
        # Callers that wait for the time between two steps.
        self._between_steps = anyio.Lock()
        self._changed = Pulse()

    @property
    def load(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self.engine.running), len(self.engine.waiting) + len(self._arrived)

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await self._changed.wait_until(self._has_work)
            async with self._between_steps:
                if not self._updating:
                    self.engine.waiting.extend(self._arrived)
                    self._arrived.clear()
                ended = await self._worker.run(self._steps) if not self.engine.idle else []
            self._deliver(ended)

    async def generate(self, wire: GenerateRequest) -> dict[str, Any]:
        """Serve one request. Cancelling it aborts it."""
        if wire.rid in self._live:
            raise bad_value(f"Duplicate request ID detected: {wire.rid}")
        self._check(wire)
        adapter = None if wire.lora_path is None else await self._adapter(wire.lora_path)
        request = Request(
            wire=wire,
            adapter=adapter,
            max_new_tokens=min(wire.max_new_tokens, self.engine.model.slots - len(wire.input_ids) - 1),
            stop_ids=frozenset() if wire.ignore_eos else self._eos | frozenset(wire.stop_token_ids),
            tokens=list(wire.input_ids),
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
                adapter.users -= 1
                self._changed.notify()
        return self._reply(request)

    async def abort(self, rid: str) -> None:
        """End one request with what it has; it answers its caller."""
        await self._abort(lambda request: request.wire.rid == rid, lambda: self.engine.abort(rid))

    async def abort_all(self) -> None:
        """End every request with what it has."""
        await self._abort(lambda request: True, self.engine.abort_all)

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping; see ``PauseMode``. New requests wait."""
        self.paused = True
        if mode == "abort":
            await self.abort_all()
        elif mode == "retract":
            await self._control(self.engine.retract_all)

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        self._changed.notify()

    async def flush(self) -> bool:
        """Forget cached prefixes; False, and nothing happens, while requests run or, not paused, wait."""
        if self.engine.running or (not self.paused and self.load[1]):
            return False
        await self._control(self.engine.flush)
        return True

    async def update_weights(self, path: Path, label: str | None, *, flush: bool, abort_all: bool) -> None:
        """Replace the weights: between two steps if paused, else after the requests that run; new ones wait."""
        if abort_all:
            await self.abort_all()
        self._updating = True
        try:
            if not self.paused:
                await self._changed.wait_until(lambda: self.paused or self.engine.idle)
            try:
                await self._control(lambda: self.engine.load_weights(path, label))
            except (OSError, ValueError) as error:
                raise WireError(400, {"success": False, "message": f"Failed to update weights: {error}"}) from error
            if flush and not await self.flush():
                message = (
                    "Weights were updated, but the cache was not flushed because requests are still running or queued."
                )
                raise WireError(400, {"success": False, "message": message})
        finally:
            self._updating = False
            self._changed.notify()

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a PEFT folder under a name that is not taken."""
        if name in self.adapters:
            raise self._lora_error(f"Failed to load LoRA adapter {name} because it is already loaded")
        model = self.engine.model
        try:
            adapter = await self._worker.run(
                lambda: load_adapter(name, Path(path), dtype=torch.float32, device=model.device)
            )
        except (OSError, ValueError, KeyError) as error:
            raise self._lora_error(f"Failed to load LoRA adapter {name}: {error}") from error
        self.adapters[name] = LoadedAdapter(adapter=adapter, path=path, uid=next(self._uids))
        self._known_paths[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter at once for new requests; returns when the last request that uses it has ended."""
        adapter = self.adapters.pop(name, None)
        if adapter is None:
            raise self._lora_error(f"LoRA adapter {name} is not loaded")
        await self._changed.wait_until(lambda: adapter.users == 0)

    def loaded_adapters(self) -> dict[str, str]:
        """Name to path."""
        return {name: adapter.path for name, adapter in self.adapters.items()}

    async def _adapter(self, name: str) -> LoadedAdapter:
        if name not in self.adapters:
            if name not in self._known_paths:
                loaded = list(self.adapters)
                raise bad_value(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {loaded}.")
            await self.load_adapter(name, self._known_paths[name])
        return self.adapters[name]

    def _lora_error(self, message: str) -> WireError:
        return WireError(400, {"success": False, "error_message": message, "loaded_adapters": self.loaded_adapters()})

    def _check(self, wire: GenerateRequest) -> None:
        length, limit = len(wire.input_ids), self._context_length
        vocabulary = self.engine.model.config.vocab_size
        if min(wire.input_ids) < 0 or max(wire.input_ids) >= vocabulary:
            raise bad_value(f"input_ids has an id outside of the vocabulary of {vocabulary}")
        if length >= limit:
            raise bad_value(f"The input ({length} tokens) is longer than the model's context length ({limit} tokens).")
        if length + wire.max_new_tokens > limit:
            raise bad_value(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {length + wire.max_new_tokens} tokens: {length} input and {wire.max_new_tokens} new."
            )
        if length >= self.engine.model.slots - 1:
            raise bad_value(
                f"Input length ({length}) exceeds the maximum allowed length ({self.engine.model.slots - 1})"
            )
        if wire.logprob_start_len > length:
            raise bad_value(f"logprob_start_len {wire.logprob_start_len} is longer than the input ({length} tokens)")

    def _has_work(self) -> bool:
        return not self.paused and (not self.engine.idle or (bool(self._arrived) and not self._updating))

    def _steps(self) -> list[Request]:
        """Some steps, until a request ends or somebody wants the time between two."""
        ended: list[Request] = []
        for _ in range(_STEPS):
            ended = self.engine.step()
            if ended or self._wanted or self._arrived or self.engine.idle:
                break
        return ended

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
            request.finish_reason = {"type": "abort", "message": "Abort in waiting queue"}
        self._deliver(never_started)
        self._deliver(await self._control(operation))

    def _deliver(self, ended: Iterable[Request]) -> None:
        for request in ended:
            live = self._live.get(request.wire.rid)
            if live is not None:
                live[1].set()
        self._changed.notify()

    def _reply(self, request: Request) -> dict[str, Any]:
        output = request.tokens[request.prompt_tokens :]
        shown = output
        if request.finish_reason is not None and not request.wire.no_stop_trim and output:
            matched = request.finish_reason.get("matched")
            shown = output[:-1] if matched == output[-1] else output
        text = self._tokenizer.decode(shown, skip_special_tokens=request.wire.skip_special_tokens)
        return generate_reply(
            request.wire,
            text=text,
            output_ids=output,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            finish_reason=request.finish_reason or {},
            weight_version=self.engine.label,
            versions=request.versions,
            cached_tokens=request.cached_tokens,
            retractions=request.retractions,
        )
