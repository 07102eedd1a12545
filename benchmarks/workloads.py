"""Named workloads for the schedule: how long trajectories, steps and publications take, and the options of the run.

How long a trajectory takes depends on nothing but its group and its place in it, so a workload is the same trace under
every schedule. ``Workload.trace`` is that trace; ``run`` runs the real trainer on it, on the virtual clock.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import anyio

import asyncrl as rl
from asyncrl.events import BarrierOpened, ChunkTrained, Event, Events, LearnerStepped, VersionCommitted
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import (
    ByteRenderer,
    ScriptedLearner,
    ScriptedPublisher,
    ScriptedSampler,
    run_virtual,
    scripted_policy,
)
from asyncrl.types import Message, Row, Trajectory
from benchmarks.clairvoyant import Trace

__all__ = ["WORKLOADS", "Outcome", "Workload", "run"]

Turns: TypeAlias = list[tuple[float, float]]
"""Seconds of sampling, and of the environment after it, for each turn of a trajectory."""
Draw: TypeAlias = Callable[[random.Random, random.Random], Turns]
"""Draws a trajectory from its own randomness, after that of its group."""
_TRAIN_SHARE = 0.9
# Of a step; the rest is the optimizer's.


def _one_turn(seconds: Callable[[random.Random], float]) -> Draw:
    return lambda group, member: [(seconds(member), 0.0)]


def _lognormal(sigma: float, mean: float = 2.0) -> Callable[[random.Random], float]:
    return lambda draw: draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)


def _exponential(mean: float) -> Callable[[random.Random], float]:
    return lambda draw: draw.expovariate(1 / mean)


def _pareto(draw: random.Random) -> float:
    return 0.7 * draw.paretovariate(1.5)


def _stragglers(draw: random.Random) -> float:
    return draw.uniform(0.8, 1.2) if draw.random() < 0.98 else 12.0


def _tools(group: random.Random, member: random.Random) -> Turns:
    return [(member.expovariate(4.0), member.expovariate(1.0)) for _ in range(member.randint(1, 6))]


def _alike(group: random.Random, member: random.Random) -> Turns:
    """Members of a group take about the same time, groups very different times."""
    return [(_lognormal(1.0)(group) * member.uniform(0.9, 1.1), 0.0)]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A trace and the options of its run. A step of the trainer takes a second of virtual time unless it says else."""

    name: str
    turns: Draw
    max_staleness: int = 2
    admit_ahead: int = 8
    oversample_factor: float = 1.0
    concurrency: int = 1024
    step_s: float = 1.0
    publication: Callable[[random.Random], float] = field(default=lambda draw: 0.1)
    groups_per_step: int = 8
    group_size: int = 4
    steps: int = 60
    seed: int = 0

    @property
    def schedule(self) -> rl.Schedule:
        """The options that are the engine's."""
        return rl.Schedule(
            concurrency=self.concurrency, admit_ahead=self.admit_ahead, oversample_factor=self.oversample_factor
        )

    @cached_property
    def trajectories(self) -> Sequence[Sequence[Turns]]:
        """Of each group."""
        return [
            [
                self.turns(random.Random(f"{self.seed} {group}"), random.Random(f"{self.seed} {group} {member}"))
                for member in range(self.group_size)
            ]
            for group in range(self.steps * self.groups_per_step)
        ]

    @cached_property
    def publication_s(self) -> Sequence[float]:
        """Of versions 1, 2, .."""
        draw = random.Random(f"{self.seed} publication")
        return [self.publication(draw) for _ in range(self.steps)]

    def trace(self) -> Trace:
        """What a schedule has to cope with."""
        return Trace(
            durations_s=[[sum(map(sum, turns)) for turns in members] for members in self.trajectories],
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            slots=self.schedule.slots(groups_per_step=self.groups_per_step, max_staleness=self.max_staleness),
            concurrency=self.concurrency,
            step_s=self.step_s,
            publication_s=self.publication_s,
        )


WORKLOADS: Sequence[Workload] = (
    Workload(name="exponential", turns=_one_turn(_exponential(2.0))),
    Workload(name="lognormal, sigma 0.5", turns=_one_turn(_lognormal(0.5))),
    Workload(name="lognormal, sigma 1.0", turns=_one_turn(_lognormal(1.0))),
    Workload(name="Pareto, shape 1.5", turns=_one_turn(_pareto)),
    Workload(name="2 % stragglers", turns=_one_turn(_stragglers)),
    Workload(name="tool-heavy turns", turns=_tools),
    Workload(name="groups alike", turns=_alike),
    Workload(name="slow publication", turns=_one_turn(_lognormal(0.5)), publication=_exponential(1.0)),
    Workload(name="admit_ahead 1 of S=4", turns=_one_turn(_lognormal(1.0)), max_staleness=4, admit_ahead=1),
    Workload(
        name="oversampled 1.5, admit_ahead 2 of S=4",
        turns=_one_turn(_lognormal(1.0)),
        max_staleness=4,
        admit_ahead=2,
        oversample_factor=1.5,
    ),
    Workload(name="S=1", turns=_one_turn(_lognormal(1.0)), max_staleness=1),
    Workload(name="S=4", turns=_one_turn(_lognormal(1.0)), max_staleness=4),
    Workload(name="S=8", turns=_one_turn(_lognormal(1.0)), max_staleness=8),
    Workload(name="trainer-bound", turns=_one_turn(_exponential(0.3)), max_staleness=4),
    Workload(name="two thirds of the room, tools", turns=_tools, concurrency=64),
    Workload(name="a third of the room, Pareto", turns=_one_turn(_pareto), max_staleness=4, concurrency=56),
    Workload(name="room for one batch", turns=_one_turn(_lognormal(0.5)), max_staleness=4, concurrency=32),
    Workload(name="room for most of a batch", turns=_one_turn(_exponential(2.0)), max_staleness=4, concurrency=24),
    Workload(name="room for half a batch", turns=_one_turn(_exponential(2.0)), concurrency=16),
)
"""In the last five, trajectories wait for room before they begin, and the bound of ``clairvoyant.py`` is tight. It need
not be: with 48 of 160 places at S=4 it is a fifth or a third too low, because it lets groups that wait be born later
than they can be. Where all schedules can be tried, none is better than the trainer
(``tests/benchmarks/test_workloads.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the trainer did with a workload, in virtual seconds."""

    end_s: float
    """The last commit."""
    busy_s: float
    """Forward-backward passes and optimizer steps."""
    barrier_s: float
    """Enough groups were ready, and the barrier was closed."""

    @property
    def idle(self) -> float:
        """Share of the time in which the trainer did nothing."""
        return 1 - self.busy_s / self.end_s


class _Chat(rl.Env):
    """Lets the environment's part of each turn pass."""

    def __init__(self, workload: Workload) -> None:
        self._trajectories = workload.trajectories

    async def reset(self, row: Row) -> list[Message]:
        """Any prompt."""
        return [{"role": "user", "content": "?"}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        """Go on until the script ends."""
        turns = self._trajectories[traj.group][traj.member]
        await anyio.sleep(turns[traj.turns - 1][1])
        return [{"role": "user", "content": "!"}] if traj.turns < len(turns) else None

    async def reward(self, traj: Trajectory, row: Row) -> float:
        """Varies within the group, so that every batch has a gradient."""
        return float(traj.member)


class _Script:
    """The sampler's part of each turn, and the publisher's times."""

    def __init__(self, workload: Workload) -> None:
        self._trajectories = workload.trajectories
        self._turns: Counter[str] = Counter()
        self._publications = iter((0.0, *workload.publication_s))  # version 0 is there from the start

    def sampling_s(self, request: SegmentRequest) -> float:
        """Called once for each turn, in order."""
        group, member = map(int, request.trajectory_id.split("-"))
        self._turns[request.trajectory_id] += 1
        return self._trajectories[group][member][self._turns[request.trajectory_id] - 1][0]

    def publication_s(self) -> float:
        """Called once for each version, in order."""
        return next(self._publications)


def run(workload: Workload) -> Outcome:
    """Run the real engine and trainer on the virtual clock."""
    script = _Script(workload)
    happened: list[Event] = []
    events = Events()
    events.subscribe(happened.append)
    trainer = rl.AsyncTrainer(
        engine=rl.RolloutEngine(
            scripted_policy(
                sampler=ScriptedSampler(seconds=script.sampling_s),
                learner=ScriptedLearner(
                    train_s=_TRAIN_SHARE * workload.step_s, step_s=(1 - _TRAIN_SHARE) * workload.step_s
                ),
                publisher=ScriptedPublisher(seconds=script.publication_s),
            ),
            env=_Chat(workload),
            renderer=ByteRenderer(),
            schedule=workload.schedule,
        ),
        optimizer=rl.Adam(lr=1e-3),
        groups_per_step=workload.groups_per_step,
        group_size=workload.group_size,
        max_staleness=workload.max_staleness,
        events=events,
    )

    async def train() -> None:
        async for _ in trainer.run([0], steps=workload.steps):
            pass

    run_virtual(train)
    return Outcome(
        end_s=max(event.time for event in happened if isinstance(event, VersionCommitted)),
        busy_s=sum(event.seconds for event in happened if isinstance(event, ChunkTrained | LearnerStepped)),
        barrier_s=sum(event.wait.seconds for event in happened if isinstance(event, BarrierOpened)),
    )
