"""Whole runs on the virtual clock: the real engine, schedule and trainer on the parts of ``truth.py``."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

import asyncrl as rl
from asyncrl.events import Event, Events
from asyncrl.sampling.base import SegmentRequest
from asyncrl.scheduling.admission import Admission
from asyncrl.testing import heavy_tail, run_virtual, scripted_policy
from asyncrl.types import Message, Row, Step, Trajectory, TruncationCause
from tests.scheduling.audit import ScheduleAudit, watched
from tests.scheduling.truth import NumberRenderer, TrueLearner, TruePublisher, TrueSampler

__all__ = ["NEWEST", "Run", "Shape", "drawn"]

T = TypeVar("T")

NEWEST = rl.KVCache(on_limit="refill", allow_reprefill=True)
"""Each request samples with the newest published version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run looks like; durations in seconds. Rows are the numbers 0..4."""

    max_staleness: int = 0
    groups_per_step: int = 2
    group_size: int = 2
    steps: int = 3
    kv_cache: rl.KVCache | None = None
    """None pins trajectories to their first version; else each segment is placed by this rule."""
    concurrency: int = 64
    requests: int | None = None
    admit_ahead: int = 8
    oversample_factor: float = 1.0
    turns: Callable[[Trajectory], int] = lambda traj: 1
    parts: int = 1
    """Segments of a turn."""
    flat_rows: frozenset[int] = frozenset()
    """Rows whose groups have no variance, and so no gradient."""
    sampling_s: Callable[[SegmentRequest], float] = lambda request: 1.0
    tool_s: Callable[[], float] = lambda: 0.0
    publication_s: Callable[[], float] = lambda: 0.0
    train_s: float = 0.0
    step_s: float = 0.0
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Further options of ``AsyncTrainer``."""

    @property
    def groups(self) -> int:
        """All groups of the run."""
        return self.steps * self.groups_per_step

    @property
    def slots(self) -> int:
        """min((1 + B) P, ceil((1 + min(ahead, B)) P f)) groups may be admitted at a time; 1 + B = (1 + S) // U."""
        most = (1 + self.max_staleness) // self.updates
        ahead = min(self.admit_ahead, most - 1)
        wanted = math.ceil((1 + ahead) * self.groups_per_step * self.oversample_factor)
        return min(most * self.groups_per_step, wanted)

    @property
    def epochs(self) -> int:
        """How often a batch is trained."""
        return int(self.trainer.get("epochs", 1))

    @property
    def updates(self) -> int:
        """Versions that a batch can make."""
        return self.epochs * int(self.trainer.get("minibatches", 1))


def drawn(
    seed: int, *, max_staleness: int, kv_cache: rl.KVCache | None = None, oversample_factor: float = 1.0
) -> Shape:
    """A random shape with heavy-tailed durations. It has steps enough for a group to become too old."""
    draw = random.Random(seed)
    turns, parts = draw.choice([(1, 1), (1, 1), (1, 1), (1, 2), (2, 1)])
    ahead = draw.choice([0, 1, max_staleness, max_staleness])
    sampling, tools = (heavy_tail(seed + k, median_s=draw.choice([0.2, 1.0])) for k in (1, 2))
    return Shape(
        max_staleness=max_staleness,
        groups_per_step=draw.choice([1, 2, 3] if max_staleness < 2 else [1, 1, 1, 2]),
        steps=max_staleness + draw.choice([2, 3]),
        kv_cache=kv_cache,
        concurrency=draw.choice([1, 2, 3, 7, 64]),
        requests=draw.choice([None, None, 1, 2]),
        # Further ahead oversampling would change nothing.
        admit_ahead=ahead if oversample_factor == 1 else min(ahead, max_staleness - 1),
        oversample_factor=oversample_factor,
        turns=lambda traj: turns,
        parts=parts,
        flat_rows=frozenset(draw.sample(range(5), draw.choice([0, 0, 2]))),
        sampling_s=lambda request: sampling(),
        tool_s=tools,
        publication_s=heavy_tail(seed + 3, median_s=draw.choice([0.02, 0.3, 2.0])),
        train_s=draw.choice([0.0, 0.1, 1.0]),
        step_s=draw.choice([0.0, 0.1]),
        trainer={"batch_order": draw.choice(["completion", "completion", "admission"])},
    )


class Chat(rl.Env):
    """Turns with a tool after each. The reward is a random number for each member, on a flat row 1."""

    def __init__(self, run: Run) -> None:
        self._shape = run.shape
        self.closed = 0
        run.envs.append(self)
        assert sum(not env.closed for env in run.envs) <= run.shape.concurrency

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": f"row {row}"}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        await anyio.sleep(self._shape.tool_s())
        return None if traj.turns >= self._shape.turns(traj) else [{"role": "user", "content": "more"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return 1.0 if row in self._shape.flat_rows else random.Random(traj.id).random()

    async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
        return await self.reward(traj, row)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed += 1


class Run:
    """One run of ``shape``, and what was seen of it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.publisher = TruePublisher(seconds=shape.publication_s)
        self.sampler = TrueSampler(self.publisher, kv_cache=shape.kv_cache, seconds=shape.sampling_s, parts=shape.parts)
        self.learner = TrueLearner(train_s=shape.train_s, step_s=shape.step_s)
        self.envs: list[Chat] = []
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self.bus = Events()
        self.bus.subscribe(self.events.append)
        engine = rl.RolloutEngine(
            scripted_policy(sampler=self.sampler, learner=self.learner, publisher=self.publisher),
            env=lambda: Chat(self),
            schedule=rl.Schedule(
                concurrency=shape.concurrency,
                max_sample_requests=shape.requests,
                admit_ahead=shape.admit_ahead,
                oversample_factor=shape.oversample_factor,
            ),
            sampling_policy="trajectory" if shape.kv_cache is None else "segment",
            kv_cache=shape.kv_cache,
            renderer=NumberRenderer(),
            environment_timeout=math.inf,
            failures=rl.Failures(untrained_batches=0),
        )
        self.trainer = rl.AsyncTrainer(
            engine=engine,
            optimizer=rl.Adam(lr=1e-3),
            groups_per_step=shape.groups_per_step,
            group_size=shape.group_size,
            max_staleness=shape.max_staleness,
            events=self.bus,
            **shape.trainer,
        )

    def start(self) -> AsyncGenerator[Step, None]:
        """The steps of the run."""
        return self.trainer.run(list(range(5)), steps=self.shape.steps)

    async def to_the_end(self) -> None:
        """Take all steps."""
        async for step in self.start():
            self.steps.append(step)

    @contextmanager
    def audited(self) -> Iterator[ScheduleAudit]:
        """A check of the run's accounts at every event."""
        with watched(Admission) as admissions:
            audit = ScheduleAudit(self.shape.slots, admissions)
            self.bus.subscribe(audit.observe)
            yield audit

    def play(self, seed: int | None = None) -> ScheduleAudit:
        """Take all steps on a virtual clock whose task order is shuffled with ``seed``."""
        with self.audited() as audit:
            run_virtual(self.to_the_end, seed=seed)
        return audit

    def of(self, kind: type[T]) -> list[T]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]
