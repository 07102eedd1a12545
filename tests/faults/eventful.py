"""Runs on three scripted servers that tell each of their moments, so that something may happen in the middle of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import asyncrl as rl
from asyncrl.events import Event, Events, MemberFailed
from asyncrl.publishing.carriers import DiskCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.rolling import RollingPublisher
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing import ByteRenderer
from asyncrl.testing.server import Receive, Scope, ScriptedServer, Send, network
from asyncrl.testing.theta import ThetaLearner
from asyncrl.types import Message, Row, Step, Trajectory

__all__ = ["MOMENTS", "STEPS", "URLS", "WAYS", "EventfulRun"]

STEPS = 4
WAYS = ("lora", "full", "rolling")
MOMENTS = 220
"""At least so many has a run of each way if nothing happens in them."""
URLS = ("http://one:1", "http://two:1", "http://three:1")
_PROBE = Probe(tokens=np.arange(8, dtype=np.int32))


class _Server(ScriptedServer):
    """Tells that somebody calls it, before it does anything."""

    def __init__(self, told: Callable[[ScriptedServer, str], None], rng: random.Random) -> None:
        super().__init__(seconds=lambda call: rng.uniform(0.0, 1.0))
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._told(self, scope["path"])
        await super().__call__(scope, receive, send)


class _Env(rl.Env):
    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        return None if traj.turns == 2 else [{"role": "user", "content": "on"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.member)


class EventfulRun:
    """``happens(run, moment, server, route)`` is called at each event of the run, and at each call of a server.

    ``server`` and ``route`` are None at an event, and while the client is not open nothing is called.
    """

    def __init__(
        self,
        way: str,
        directory: Path,
        happens: Callable[[EventfulRun, int, ScriptedServer | None, str | None], None] = lambda *_: None,
    ) -> None:
        rng = random.Random(0)
        self.moments = 0
        self._happens = happens
        self.servers = {url: _Server(self._moment, rng) for url in URLS}
        self.sampler = SGLang(URLS, transport=network(self.servers))
        learner = ThetaLearner(lora_rank=4 if way == "lora" else None)
        publisher: Any
        if way == "lora":
            publisher = LoraPublisher(learner, self.sampler, DiskAdapters(learner, directory), "run", probe=_PROBE)
        elif way == "full":
            publisher = FullPublisher(learner, self.sampler, DiskCarrier(learner, directory), probe=_PROBE)
        else:
            publisher = RollingPublisher(learner, self.sampler, DiskCarrier(learner, directory), probe=_PROBE)
        segments: dict[str, Any] = {"sampling_policy": "segment", "kv_cache": rl.KVCache(max_staleness=1)}
        engine = rl.RolloutEngine(
            rl.Policy(learner, sampler=self.sampler, publisher=publisher),
            env=_Env,
            renderer=ByteRenderer(),
            budget=rl.Budget(max_turns=2, max_turn_tokens=8),
            **(segments if way == "full" else {}),
        )
        self.events: list[Event] = []
        bus = Events()
        bus.subscribe(self._observe)
        self.trainer = rl.AsyncTrainer(
            engine=engine,
            groups_per_step=2,
            group_size=2,
            max_staleness=1,
            optimizer=rl.Adam(lr=1e-3),
            events=bus,
        )
        self.steps: list[Step] = []

    async def play(self) -> None:
        """All steps."""
        async for step in self.trainer.run(list(range(8)), steps=STEPS):
            self.steps.append(step)

    @property
    def failures(self) -> list[str]:
        """Why members failed."""
        return [event.error for event in self.events if isinstance(event, MemberFailed)]

    def _observe(self, event: Event) -> None:
        self.events.append(event)
        self._moment(None, None)

    def _moment(self, server: ScriptedServer | None, route: str | None) -> None:
        moment, self.moments = self.moments, self.moments + 1
        if self.sampler.live:
            self._happens(self, moment, server, route)
