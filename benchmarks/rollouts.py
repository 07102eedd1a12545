"""One measured run of asyncrl or of river-client on stubs that answer at once: what is left is orchestration.

The same load on both sides: a prompt of 64 tokens, 16 sampled in each turn, 32 of a tool's answer between two, a token
a byte, groups of 16. Both sides call a real tool through their own machinery. A process measures one side, a few times,
and prints one JSON list::

    python -m benchmarks.rollouts --side asyncrl --turns 3 --concurrency 1024 --max-staleness 2 --trajectories 4096
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import anyio
import numpy as np

import asyncrl as rl
from asyncrl.learning.base import ChunkResult, TrainingSequence
from asyncrl.rollout.renderer import ParsedTurn
from asyncrl.rollout.tools import Tool
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ByteRenderer, ScriptedLearner, ScriptedPublisher, ScriptedSampler, scripted_policy
from asyncrl.testing.scripted import chunk_result
from asyncrl.types import IntArray, Message, Row, Segment, StopReason, ToolCall, Trajectory, VersionSpan

__all__ = ["ANSWER", "CALL", "GROUP_SIZE", "OBSERVATION", "PROMPT", "Load", "Measured", "scripted_run"]

GROUP_SIZE = 16
PROMPT = "p" * 64
OBSERVATION = "o" * 32
CALL = [ord("T"), *[ord("x")] * 14, END]
"""A turn that calls the tool."""
ANSWER = [ord("A"), *[ord("x")] * 14, END]
"""The last turn."""
_TICK_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``concurrency`` trajectories of ``turns`` turns are in flight: 1 + ``max_staleness`` batches."""

    turns: int
    concurrency: int
    max_staleness: int
    trajectories: int
    """At least so many in all."""

    @property
    def groups_per_step(self) -> int:
        """Groups of a batch."""
        return max(1, self.concurrency // (GROUP_SIZE * (1 + self.max_staleness)))

    @property
    def steps(self) -> int:
        """Whole batches, a few at least."""
        return max(2 + self.max_staleness, -(-self.trajectories // (self.groups_per_step * GROUP_SIZE)))

    @property
    def segments(self) -> int:
        """Sampling requests of the whole run."""
        return self.steps * self.groups_per_step * GROUP_SIZE * self.turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run cost."""

    segments: int
    trajectories: int
    cpu_s: float
    """Of the process, all threads."""
    stall_s: float
    """Most CPU time that the event loop's thread spent between two ticks of a timer of 2 ms."""


Side: TypeAlias = Callable[[Load], Awaitable[int]]
"""Trains the load and returns how many segments were sampled."""


class _Ticker:
    """Measures stalls in CPU time, which does not grow when other processes want the cores."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._last = time.thread_time()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def stop(self) -> None:
        """End the measurement."""
        self._tick()
        self._timer.cancel()

    def _tick(self) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self._last)
        self._last = now
        self._timer = self._loop.call_later(_TICK_S, self._tick)


class _Sampler(ScriptedSampler):
    """Answers at once, as the other side's stub does: one of two turns, without waiting."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.served = 0
        self._last_context = len(PROMPT) + (turns - 1) * (len(CALL) + len(OBSERVATION))
        self._call = np.array(CALL, dtype=np.int32)
        self._answer = np.array(ANSWER, dtype=np.int32)
        self._logprobs = np.full(len(ANSWER), -0.5, dtype=np.float32)

    async def sample(self, request: SegmentRequest) -> Segment:
        """A call of the tool, or in the last turn an answer."""
        self.served += 1
        tokens = self._answer if len(request.input_ids) >= self._last_context else self._call
        versions = (VersionSpan(version=request.version, start=0, end=len(tokens)),)
        return Segment(tokens=tokens, logprobs=self._logprobs, versions=versions, stop=StopReason.STOP)


class _Learner(ScriptedLearner):
    """Looks at no sequence, as the other side's stub does."""

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        """A gradient of nothing."""
        return replace(chunk_result(()), tokens=len(sequences))


class _Renderer(ByteRenderer):
    """A turn that begins with T calls the tool."""

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """The bytes as text, and the call."""
        parsed = await super().parse(turn_ids, tools)
        calls = (ToolCall(name="lookup", arguments={"key": 7}),) if turn_ids[0] == CALL[0] else ()
        return ParsedTurn(message=parsed.message, tool_calls=calls)


class _Chat(rl.Env):
    """Looks something up in every turn but the last."""

    async def reset(self, row: Row) -> list[Message]:
        """The prompt."""
        return [{"role": "user", "content": PROMPT}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        """Varies within each group."""
        return float(traj.member % 2)

    @rl.tool
    async def lookup(self, key: int) -> str:
        """Return what is known about the key."""
        return OBSERVATION


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedRun:
    """A trainer on stubs, and how many steps its load has."""

    trainer: rl.AsyncTrainer
    sampler: _Sampler
    steps: int

    async def train(self) -> int:
        """Take all steps; returns how many segments were sampled."""
        async for _ in self.trainer.run(range(4096), steps=self.steps):
            pass
        return self.sampler.served


def scripted_run(load: Load) -> ScriptedRun:
    """The real engine, schedule and trainer on scripted parts."""
    sampler = _Sampler(load.turns)
    engine = rl.RolloutEngine(
        scripted_policy(sampler=sampler, learner=_Learner(), publisher=ScriptedPublisher()),
        env=_Chat,
        renderer=_Renderer(),
        schedule=rl.Schedule(concurrency=load.concurrency),
    )
    trainer = rl.AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=1e-5),
        groups_per_step=load.groups_per_step,
        group_size=GROUP_SIZE,
        max_staleness=load.max_staleness,
    )
    return ScriptedRun(trainer=trainer, sampler=sampler, steps=load.steps)


async def _asyncrl(load: Load) -> int:
    return await scripted_run(load).train()


async def _measure(side: Side, load: Load) -> Measured:
    gc.collect()
    gc.freeze()  # modules and classes are not looked at again, by either side's garbage collections
    ticker = _Ticker()
    started = time.process_time()
    segments = await side(load)
    cpu_s = time.process_time() - started
    ticker.stop()
    if segments != load.segments:
        raise AssertionError(f"{segments} segments were sampled, but the load has {load.segments}")
    return Measured(segments=segments, trajectories=segments // load.turns, cpu_s=cpu_s, stall_s=ticker.longest_s)


def main() -> None:
    """Measure one side and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=("asyncrl", "river"), required=True)
    for option in ("turns", "concurrency", "max-staleness", "trajectories"):
        parser.add_argument(f"--{option}", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=1)
    options = vars(parser.parse_args())
    repeats = options.pop("repeats")
    side: Side = _asyncrl
    if options.pop("side") == "river":
        from benchmarks.river_stub import train

        side = train
    load = Load(**options)
    anyio.run(_measure, side, replace(load, concurrency=64, trajectories=64))  # warm up
    print(json.dumps([asdict(anyio.run(_measure, side, load)) for _ in range(repeats)]))


if __name__ == "__main__":
    main()
