"""Servers that are removed at any moment of a run, and come back under the same URL: nobody notices but the servers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.events import Event, Events, MemberFailed
from asyncrl.publishing.carriers import DiskCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.rolling import RollingPublisher
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing import ByteRenderer, run_virtual
from asyncrl.testing.server import Receive, Scope, ScriptedServer, Send, network
from asyncrl.testing.theta import ThetaLearner
from asyncrl.types import Message, Row, Step, Trajectory

PROBE = Probe(tokens=np.arange(8, dtype=np.int32))
STEPS = 4
WAYS = ("lora", "full", "rolling")


class _Server(ScriptedServer):
    """Tells that somebody calls it, before it does anything."""

    def __init__(self, told: Callable[[], None], rng: random.Random) -> None:
        super().__init__(seconds=lambda call: rng.uniform(0.0, 1.0))
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._told()
        await super().__call__(scope, receive, send)


class _Env(rl.Env):
    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        return None if traj.turns == 2 else [{"role": "user", "content": "on"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.member)


class _Run:
    """A run on three servers, one of which is removed at one moment and added again at a later one."""

    def __init__(self, way: str, directory: Path, *, at: int = -1, now: bool = False, again_after: int = 7) -> None:
        rng = random.Random(0)
        self.moments = 0
        self._at, self._now, self._again_at = at, now, at + again_after
        self.urls = ("http://one:1", "http://two:1", "http://three:1")
        self._gone = self.urls[max(at, 0) % 3]
        servers = {url: _Server(self._moment, rng) for url in self.urls}
        self.sampler = SGLang(self.urls, transport=network(servers))
        learner = ThetaLearner(lora_rank=4 if way == "lora" else None)
        publisher: Any
        if way == "lora":
            publisher = LoraPublisher(learner, self.sampler, DiskAdapters(learner, directory), "run", probe=PROBE)
        elif way == "full":
            publisher = FullPublisher(learner, self.sampler, DiskCarrier(learner, directory), probe=PROBE)
        else:
            publisher = RollingPublisher(learner, self.sampler, DiskCarrier(learner, directory), probe=PROBE)
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

    def _observe(self, event: Event) -> None:
        self.events.append(event)
        self._moment()

    def _moment(self) -> None:
        """An event of the run, or a call that comes to a server; the removal is in the middle of it."""
        moment, self.moments = self.moments, self.moments + 1
        if not self.sampler.live:
            return  # it is being opened or closed, or all servers are away
        if moment == self._at:
            self.sampler.remove(self._gone, now=self._now)
        if moment >= self._again_at > self._at and self._gone not in self.sampler.urls:
            self.sampler.add(self._gone)


_MOMENTS = 220
"""At least so many has a run of each way; see the first test."""


@pytest.mark.parametrize("way", WAYS)
def test_a_run_without_removals_has_these_moments(way: str, tmp_path: Path, threads_in_place: None) -> None:
    """The moments of the tests below are moments of the run."""
    run = _Run(way, tmp_path)
    run_virtual(run.play)
    assert len(run.steps) == STEPS
    assert run.moments >= _MOMENTS


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [4, 11])
def test_a_server_may_go_and_come_back_at_any_moment(
    way: str, first: int, tmp_path: Path, threads_in_place: None
) -> None:
    """While it opens, samples, retries, is published to, restored, vacated or asked for its load: no member fails."""
    for at in range(first, _MOMENTS, 23):
        directory = tmp_path / str(at)
        directory.mkdir()
        run = _Run(way, directory, at=at, now=at % 2 == 0, again_after=1 + at % 40)
        run_virtual(run.play, seed=at)
        assert len(run.steps) == STEPS, at
        failures = [event.error for event in run.events if isinstance(event, MemberFailed)]
        assert failures == [], at


@pytest.mark.parametrize("now", [False, True])
async def test_the_last_server_stays(now: bool) -> None:
    """It is refused by name, and everything goes on."""
    one = ScriptedServer()
    sampler = SGLang(["http://one:1"], transport=network({"http://one:1": one}))
    async with sampler.opened():
        with pytest.raises(ConfigError, match="it is the last server"):
            sampler.remove("http://one:1", now=now)
        assert sampler.urls == ["http://one:1"]
