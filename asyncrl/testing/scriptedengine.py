"""What a scripted SGLang server is made of behind its routes: requests, weights, adapters, pauses and a prefix cache.

It follows SGLang 0.5.23's rules, of which ``tests/conformance`` holds it to those that matter to a trainer. Tokens
appear at an even pace on the loop's clock, and only when somebody looks, so that a request costs no task and no timer
for each of them. Nothing that it is sent is ever unpickled: theta is the name of a tensor.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from asyncrl.concurrency.notifier import Notifier
from asyncrl.sampling.wire import PauseMode
from asyncrl.servers.adapters import Adapters, AdapterSource
from asyncrl.servers.backend import Broadcast, GroupPlace
from asyncrl.servers.generation import ABORTED, ABORTED_WAITING
from asyncrl.servers.wireserver import GenerateRequest, ServerLimits, bad_value
from asyncrl.testing.scriptedrun import PrefixMemory, Run, text_of
from asyncrl.testing.theta import find_theta, read_theta

__all__ = ["ScriptedEngine"]


class ScriptedEngine:
    """The ``Backend`` of one server, whose weights are theta.

    ``changed`` is notified after each change. ``eos``: ids that end a request that does not ignore them.
    """

    used_tokens = 0

    def __init__(self, *, limits: ServerLimits, eos: frozenset[int], ignores_adapters: bool, changed: Notifier) -> None:
        self.limits = limits
        self.paused: PauseMode | None = None
        self.adapters = Adapters(_read)
        self.reloaded: list[str] = []
        """Adapters that were not loaded when a request named them."""
        self._eos = eos
        self._ignores_adapters = ignores_adapters
        self._changed = changed
        self._gate = Notifier()
        self._drained = Notifier()
        self.theta = 0.0
        """The base weights."""
        self._label = "default"
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
    def load(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self._running), len(self._waiting)

    @property
    def tokens_per_second(self) -> float:
        """Sum over all running requests."""
        return sum(run.tokens_per_second for run in self._running)

    def become(self, theta: float | None, label: str | None) -> None:
        """Change the base weights, also those of running requests, and their label; None keeps what is."""
        self._catch_up()
        self.theta = self.theta if theta is None else theta
        self._label = self._label if label is None else label

    def forget(self) -> None:
        """Be a new process, for everything but the requests that are being answered."""
        self.adapters.hold({})
        self._prefixes.clear()
        self.become(0.0, "default")
        self.resume()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self, wire: GenerateRequest, script: Sequence[int] | None, *, seconds: float, held: bool
    ) -> dict[str, Any]:
        """Answer a request with ``script``, or with tokens that are drawn, over ``seconds``."""
        if wire.rid in self._live:
            raise bad_value(f"Duplicate request ID detected: {wire.rid}")
        run = self._live[wire.rid] = Run(
            wire=wire,
            tokens=array("q", wire.input_ids),
            stop_ids=frozenset() if wire.ignore_eos else self._eos | frozenset(wire.stop_token_ids),
            script=script,
            seconds=seconds,
            held=held,
        )
        self._changed.notify()
        try:
            await self._gate.wait_until(lambda: self.paused is None and not self._writers)
            self._inside += 1
            try:
                run.allow(self.limits.allowed_new_tokens(wire))
                late = wire.lora_path is not None and wire.lora_path not in self.adapters.paths
                async with self.adapters.using(wire.lora_path) as run.adapter:
                    if late:
                        self.reloaded.append(str(wire.lora_path))
                    await self._compute(run)
            finally:
                self._leave(run)
        finally:
            del self._live[wire.rid]
            self._changed.notify()
        return run.reply(label=self._label, decode=text_of)

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

    async def pause(self, mode: PauseMode) -> None:
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
        if self._running or (self._waiting and self.paused is None):
            return False
        self._prefixes.clear()
        return True

    # -- weights ------------------------------------------------------------------------------------------------------

    async def update(self, weights: Path | float | None, label: str | None) -> None:
        """Take theta: a number, or read from a folder; None changes only the label."""
        self.become(read_theta(weights) if isinstance(weights, Path) else weights, label)

    def unpacked(self, payloads: Sequence[bytes]) -> float | None:
        """Theta is the name of a tensor; without one only the label changes."""
        return find_theta(payloads)

    async def join(self, place: GroupPlace) -> None:
        """Nothing to do: no process connects to the group."""

    async def receive(self, group: None, broadcast: Broadcast) -> float | None:
        """Theta from the announced names of tensors; nothing is sent."""
        return find_theta(str(name).encode() for name in broadcast.names)

    async def checksums(self) -> dict[str, str]:
        """A digest of theta, the only weight."""
        return {"theta": hashlib.sha256(str(self.theta).encode()).hexdigest()[:16]}

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

    # -- how a request goes on ----------------------------------------------------------------------------------------

    async def _compute(self, run: Run) -> None:
        self._waiting.append(run)
        self._admit()
        while run.finish_reason is None:
            if not run.running:
                await run.changed.wait()
                continue
            # Also if nothing is left: no server answers before its caller could do something else.
            with anyio.move_on_after(run.seconds_left()):
                await run.changed.wait()
            if run.running:
                self._advance(run)

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
            self._prefixes.insert(run.namespace, run.tokens[:-1])
        elif run in self._waiting:
            self._waiting.remove(run)
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
        """Give running requests the tokens that are due by now, before the weights change."""
        for run in self._running:
            if run.running:
                self._advance(run)

    def _advance(self, run: Run) -> None:
        run.advance(self._theta_for(run), self._label, uniform=self._random.random)

    def _theta_for(self, run: Run) -> float:
        return self.theta if run.adapter is None or self._ignores_adapters else run.adapter.weights

    def _open_gate(self) -> None:
        self._gate.notify()
        self._changed.notify()


async def _read(source: AdapterSource) -> float:
    theta = read_theta(Path(source)) if isinstance(source, str) else find_theta(source)
    if theta is None:
        raise ValueError("no tensor is named after its theta")
    return theta
