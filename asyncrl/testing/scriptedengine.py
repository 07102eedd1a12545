"""What a scripted SGLang server is made of behind its routes: requests, weights, adapters, pauses and a prefix cache.

It follows SGLang 0.5.23's rules, of which ``tests/conformance`` holds it to those that matter to a trainer. Tokens
appear at an even pace on the loop's clock, and only when somebody looks, so that a request costs no task and no timer
for each of them. Nothing that it is sent is ever unpickled: theta is the name of a tensor.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from asyncrl.concurrency.notifier import Notifier
from asyncrl.servers.adapters import Adapters
from asyncrl.servers.wireserver import (
    ABORTED,
    ABORTED_WAITING,
    GenerateRequest,
    allowed_new_tokens,
    bad_value,
    generate_reply,
    longest_prompt,
    update_error,
)
from asyncrl.testing.scriptedrun import PrefixMemory, Run
from asyncrl.testing.theta import VOCABULARY, decoded, find_theta, find_theta_in

__all__ = ["ScriptedEngine", "ScriptedLimits"]

_IN_BODY = "__tensor__"
# What SGLang says is the path of an adapter that came in a request.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedLimits:
    """Sizes of a scripted server. Those that are None are not told by ``/server_info``."""

    context_length: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    """More requests wait in the queue."""
    vocab_size: int | None = None
    """Ids outside of it are refused."""


class ScriptedEngine:
    """The state behind one server; its coroutines answer as the routes of the same name do, or raise ``WireError``.

    ``changed`` is notified after each change. ``eos``: ids that end a request that does not ignore them.
    """

    def __init__(
        self, *, limits: ScriptedLimits, eos: frozenset[int], ignores_adapters: bool, changed: Notifier
    ) -> None:
        self.limits = limits
        self.label = "default"
        """Of the last update that succeeded; requests may carry another one after an update that could not flush."""
        self.model_path = "scripted"
        self.paused: str | None = None
        self.more_limits: dict[str, int] = {}
        """More sizes that ``/server_info`` tells."""
        self.adapters = Adapters(_read)
        self._eos = eos
        self._ignores_adapters = ignores_adapters
        self._changed = changed
        self._gate = Notifier()
        self._drained = Notifier()
        self._theta = 0.0
        self._run_label = "default"
        self._live: dict[str, Run] = {}
        self._waiting: deque[Run] = deque()
        self._running: list[Run] = []
        self._inside = 0
        # Requests that have passed the gate. An update waits for them, and they hold it off.
        self._writers = 0
        self._prefixes = PrefixMemory()
        self._random = random.Random(0)

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return len(self._live)

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and output together, None if there is no bound."""
        return self.limits.context_length

    @property
    def load(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self._running), len(self._waiting)

    @property
    def tokens_per_second(self) -> float:
        """Of all running requests."""
        return sum(run.tokens_per_second for run in self._running)

    @property
    def theta(self) -> float:
        """The base weights; whoever sets them changes those of running requests too."""
        return self._theta

    @theta.setter
    def theta(self, value: float) -> None:
        self._catch_up()
        self._theta = value

    async def relabel(self, label: str) -> None:
        """Give the base weights another label; tokens that follow carry it."""
        self.set_label(label)

    def set_label(self, label: str) -> None:
        """The same, at once."""
        self._catch_up()
        self.label = self._run_label = label

    def forget(self) -> None:
        """Be a new process, for everything but the requests that are being answered."""
        self.adapters.clear(known=True)
        self._prefixes.clear()
        self.theta = 0.0
        self.set_label("default")
        self.resume()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self, wire: GenerateRequest, script: Sequence[int] | None, *, seconds: float, held: bool
    ) -> dict[str, Any]:
        """Answer a request with ``script``, or with tokens that are drawn, over ``seconds``."""
        if wire.rid in self._live:
            raise bad_value(f"Duplicate request ID detected: {wire.rid}")
        run = self._live[wire.rid] = Run(wire, script, seconds=seconds, held=held)
        self._changed.notify()
        try:
            await self._gate.wait_until(lambda: self.paused is None and not self._writers)
            self._inside += 1
            try:
                await self._compute(run)
            finally:
                self._leave(run)
        finally:
            del self._live[wire.rid]
            self._changed.notify()
        assert run.finish is not None
        return generate_reply(
            wire,
            text=run.text(),
            output_ids=run.output,
            logprobs=run.logprobs,
            prompt_logprobs=run.prompt_logprobs(),
            finish_reason=run.finish,
            weight_version=self._run_label,
            versions=run.versions,
            cached_tokens=run.cached_tokens,
            retractions=run.retractions,
        )

    def release(self) -> None:
        """Every request has its tokens as soon as it runs."""
        for run in self._live.values():
            run.hurry()

    async def abort(self, rid: str) -> None:
        """End a request. One at the gate is not found there, and cannot be aborted any more, as in SGLang."""
        run = self._live.get(rid)
        if run is not None and not run.abort_sent:
            run.abort_sent = True
            self._end(run)

    async def abort_all(self) -> None:
        """End every request that has passed the gate."""
        for run in [*self._waiting, *self._running]:
            self._end(run)

    # -- pauses -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Hold new requests at the gate, and end, send back or freeze those that run."""
        self._catch_up()
        self.paused = mode
        for run in reversed(self._running):
            if mode == "retract":
                run.retractions += 1
                self._waiting.appendleft(run)
            run.stop(lag=self._theta_for(run) if mode == "in_place" else None)
        if mode == "retract":
            self._running.clear()
        if mode == "abort":
            await self.abort_all()
            await self._drained.wait_until(lambda: not self._inside)

    def resume(self) -> None:
        """Go on; what was to be aborted while it was frozen ends now."""
        self.paused = None
        for run in list(self._running):
            if run.abort_pending:
                run.finished(ABORTED)
            elif not run.running:
                run.go()
        self._admit()
        self._open_gate()

    async def flush(self) -> bool:
        """Forget prefixes; False, and nothing happens, while requests run or, not paused, wait."""
        return self._flush()

    def _flush(self) -> bool:
        if self._running or (self._waiting and self.paused is None):
            return False
        self._prefixes.clear()
        return True

    # -- weights ------------------------------------------------------------------------------------------------------

    async def update_weights(self, weights: Path, label: str | None, *, flush: bool, abort_all: bool) -> None:
        """Take theta from a folder."""
        if abort_all:
            await self.abort_all()
        async with self.exclusive():
            theta = find_theta_in(weights)
            if theta is None:
                raise update_error(f"Failed to get weights iterator: {weights}")
            self.replace(theta, label, flush=flush)
            self.model_path = str(weights)

    def replace(self, theta: float, label: str | None, *, flush: bool) -> None:
        """Take ``theta`` as the base weights; ``WireError`` if the cache was to be flushed and could not be."""
        self.theta = theta
        if label is not None:
            self._run_label = label
        if flush and not self._flush():
            raise update_error(
                "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                "Retract or finish them, then call /flush_cache."
            )
        if label is not None:
            self.label = label

    @asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[None, None]:
        """At once if paused; else after the requests that have passed the gate, and new ones wait."""
        if self.paused is not None:
            yield
            return
        self._writers += 1
        try:
            await self._drained.wait_until(lambda: not self._inside)
            yield
        finally:
            self._writers -= 1
            self._open_gate()

    async def checksums(self) -> dict[str, str]:
        """A digest of theta."""
        return {"theta": hashlib.sha256(str(self._theta).encode()).hexdigest()[:16]}

    # -- adapters, and what the server says of itself -----------------------------------------------------------------

    def hold_adapters(self, paths: Mapping[str, Path]) -> None:
        """Have these adapters loaded, and no others."""
        self.adapters.clear()
        for name, path in paths.items():
            self.adapters.put(name, str(path), find_theta_in(path) or 0.0)

    async def load_adapter_from_tensors(self, name: str, payloads: Sequence[object]) -> None:
        """Load theta from the name of a tensor in ``payloads``, which are in base64."""
        theta = find_theta(decoded(payloads))
        if theta is None:
            raise self.adapters.refusal(name, "from tensors")
        await self.adapters.load(name, _IN_BODY, theta)

    def model_details(self) -> dict[str, Any]:
        """There is no tokenizer."""
        return {"tokenizer_path": "scripted"}

    def server_details(self) -> dict[str, Any]:
        """The sizes that the server has."""
        limits, context = self.limits, self.context_length
        sizes = {
            "max_total_num_tokens": limits.max_total_tokens,
            "max_running_requests": limits.max_running_requests,
            "max_req_input_len": context and longest_prompt(context, limits.max_total_tokens or context),
        }
        return {name: size for name, size in sizes.items() if size is not None} | self.more_limits

    def load_details(self) -> dict[str, Any]:
        """The sizes, if both are known."""
        pool, most = self.limits.max_total_tokens, self.limits.max_running_requests
        if pool is None or most is None:
            return {}
        return {"max_total_num_tokens": pool, "max_running_requests": most, "token_usage": 0.0}

    # -- how a request goes on ----------------------------------------------------------------------------------------

    async def _compute(self, run: Run) -> None:
        run.allow(self._allowed(run.wire))
        if run.wire.lora_path is not None:
            run.adapter = await self.adapters.named(run.wire.lora_path)
            run.adapter.users += 1
        self._waiting.append(run)
        self._admit()
        while run.finish is None:
            if not run.running:
                await run.changed.wait()
                continue
            # Also if nothing is left: no server answers before its caller could do something else.
            with anyio.move_on_after(run.seconds_left()):
                await run.changed.wait()
            if run.running:
                self._advance(run)

    def _allowed(self, wire: GenerateRequest) -> int:
        vocabulary = self.limits.vocab_size
        if vocabulary is not None and (min(wire.input_ids) < 0 or max(wire.input_ids) >= vocabulary):
            raise bad_value(f"input_ids has an id outside of the vocabulary of {vocabulary}")
        context, pool = self.limits.context_length, self.limits.max_total_tokens
        if context is None and pool is None and wire.max_new_tokens is not None:
            return wire.max_new_tokens
        fits = min(context or pool or VOCABULARY, pool or context or VOCABULARY)
        return allowed_new_tokens(wire, context_length=context or fits, kv_tokens=pool or fits)

    def _admit(self) -> None:
        most = self.limits.max_running_requests or math.inf
        while self._waiting and self.paused is None and len(self._running) < most:
            run = self._waiting.popleft()
            run.prefill(self._prefixes, self._theta_for(run))
            self._running.append(run)
            run.go()

    def _leave(self, run: Run) -> None:
        """The request ended, or its client went away."""
        if run in self._running:
            self._running.remove(run)
            self._prefixes.insert(run.namespace, [*run.wire.input_ids, *run.output][:-1])
        elif run in self._waiting:
            self._waiting.remove(run)
        if run.adapter is not None:
            self.adapters.end_use(run.adapter)
        self._inside -= 1
        self._admit()
        self._drained.notify()

    def _end(self, run: Run) -> None:
        if run in self._waiting:
            run.finished(ABORTED_WAITING)
        elif run in self._running and self.paused == "in_place":
            run.abort_pending = True
        elif run in self._running:
            if run.running:
                self._advance(run)
            run.finished(ABORTED)

    def _catch_up(self) -> None:
        """What is due by now comes from the weights as they are."""
        for run in self._running:
            if run.running:
                self._advance(run)

    def _advance(self, run: Run) -> None:
        run.advance(self._theta_for(run), self._run_label, eos=self._eos, uniform=self._random.random)

    def _theta_for(self, run: Run) -> float:
        return self._theta if run.adapter is None or self._ignores_adapters else run.adapter.weights

    def _open_gate(self) -> None:
        self._gate.notify()
        self._changed.notify()


async def _read(name: str, path: Path) -> float:
    theta = find_theta_in(path)
    if theta is None:
        raise ValueError("it holds no theta")
    return theta
