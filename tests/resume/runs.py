"""Runs that are stopped, killed and resumed, on the virtual clock: the real trainer on the parts of ``truth.py``."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

import asyncrl as rl
from asyncrl.checkpoint.journal import Journal
from asyncrl.checkpoint.state import JournalEntry
from asyncrl.events import Event, Events
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ScriptedLearner, ScriptedPublisher, ScriptedSampler, run_virtual, scripted_policy
from asyncrl.types import Message, Row, Step, Trajectory, TruncationCause
from tests.scheduling.truth import NumberRenderer

__all__ = ["Chat", "Life", "Plan", "assert_ages", "consumed_rows", "entries", "image"]

ROWS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run looks like; durations in seconds. Rows are the numbers 0..6."""

    steps: int = 5
    groups_per_step: int = 2
    group_size: int = 2
    max_staleness: int = 0
    turns: int = 2
    recovery: str = "stateless"
    weights_every: int = 2
    rollout_every: float = 0.7
    flat_rows: frozenset[int] = frozenset()
    broken_rows: frozenset[int] = frozenset()
    """Rows whose reward raises: their groups are dropped."""
    concurrency: int = 64
    sampling_s: Callable[[SegmentRequest], float] = lambda request: 0.3 + 0.1 * (_number(request) % 5)
    tool_s: float = 0.2
    train_s: float = 0.3
    step_s: float = 0.1
    publication_s: float = 0.4
    engine: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(
        default_factory=lambda: {"batch_order": "admission", "forward_backward_batch": None}
    )
    heldout: int = 0


def _number(request: SegmentRequest) -> int:
    """The same for the same request, whatever came before it."""
    name = request.trajectory_id.removeprefix("eval")
    return sum(name.encode()) * 31 + len(request.input_ids) * 7 + request.version * 13


def _tokens(request: SegmentRequest) -> list[int]:
    """Depend on the trajectory, the position and the version, and on nothing else; each says its version."""
    draw = random.Random(_number(request))
    return [256 + request.version * 1000 + draw.randrange(1000) for _ in range(draw.randrange(1, 5))] + [END]


class Chat(rl.Env):
    """A tool after each turn. The reward is a function of the tokens; an environment that was lost would give less."""

    def __init__(self, life: Life) -> None:
        self._plan = life.plan
        self._said = 0
        self.recovery = life.plan.recovery  # type: ignore[assignment]
        life.envs.append(self)
        self.closed = 0

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": f"row {row}"}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        await anyio.sleep(self._plan.tool_s)
        self._said += 1
        return None if traj.turns >= self._plan.turns else [{"role": "user", "content": f"more {traj.turns}"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        await anyio.sleep(0.05)
        if row in self._plan.broken_rows:
            raise KeyError("no such answer")
        if self._plan.recovery == "snapshot":
            assert self._said == self._plan.turns, "it was brought back to where it was"
        return 1.0 if row in self._plan.flat_rows else float(int(traj.tokens().sum()) % 17)

    async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
        return await self.reward(traj, row)

    async def snapshot(self, traj: Trajectory) -> Any:
        return {"said": self._said}

    async def restore(self, traj: Trajectory, state: Any) -> None:
        self._said = state["said"]

    async def close(self) -> None:
        self.closed += 1


class Life:
    """One process of a run: from its start, or where the one before was killed, to its end or its own."""

    def __init__(self, plan: Plan, directory: Path | None, *, steps: int | None = None, env: type[Chat] = Chat) -> None:
        self.plan = plan
        self.directory = directory
        self.planned = plan.steps if steps is None else steps
        self.envs: list[Chat] = []
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self.sampler = ScriptedSampler(seconds=plan.sampling_s, tokens=_tokens)
        self.learner = ScriptedLearner(train_s=plan.train_s, step_s=plan.step_s)
        self.publisher = ScriptedPublisher(seconds=lambda: plan.publication_s)
        bus = Events()
        bus.subscribe(self.events.append)
        self.bus = bus
        self.engine = rl.RolloutEngine(
            scripted_policy(sampler=self.sampler, learner=self.learner, publisher=self.publisher),
            env=lambda: env(self),
            renderer=NumberRenderer(),
            schedule=rl.Schedule(concurrency=plan.concurrency),
            **plan.engine,
        )
        kept = None
        if directory is not None:
            kept = rl.Checkpointing(directory, weights_every=plan.weights_every, rollout_every=plan.rollout_every)
        self.trainer = rl.AsyncTrainer(
            engine=self.engine,
            optimizer=rl.Adam(lr=1e-3),
            groups_per_step=plan.groups_per_step,
            group_size=plan.group_size,
            max_staleness=plan.max_staleness,
            events=bus,
            checkpointing=kept,
            evaluator=rl.Evaluator(rows=list(range(plan.heldout)), every=2) if plan.heldout else None,
            **plan.trainer,
        )

    async def live(self) -> None:
        """Take all steps that are left."""
        async with aclosing(self.trainer.run(list(range(ROWS)), steps=self.planned)) as steps:
            async for step in steps:
                self.steps.append(step)

    async def live_for(self, seconds: float) -> bool:
        """Stop in order after so long; True if the run was not over before."""
        with anyio.move_on_after(seconds) as scope:
            await self.live()
        return scope.cancelled_caught

    def play(self, seconds: float | None = None, *, seed: int | None = None) -> bool:
        """On a virtual clock of its own; see ``live_for``."""
        if seconds is None:
            run_virtual(self.live, seed=seed)
            return False
        return run_virtual(self.live_for, seconds, seed=seed)

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def image(directory: Path, copy: Path) -> Path:
    """What a process that is killed now leaves."""
    if copy.exists():
        shutil.rmtree(copy)
    return shutil.copytree(directory, copy) if directory.exists() else copy


def entries(directory: Path) -> list[JournalEntry]:
    """The journal of a run that never saved weights, so that all of it is there."""
    journal = Journal(directory / "journal", directory / "refused")
    return [journal.read(n) for n in journal.steps()]


def consumed_rows(journal: Sequence[JournalEntry]) -> Counter[int]:
    """Group -> how often the last of it was consumed."""
    return Counter(consumed.group for entry in journal for consumed in entry.consumed if consumed.final)


def assert_ages(life: Life) -> None:
    """By the versions that the sampled tokens spell and the learner's own count, which resuming has to restore."""
    first = life.learner.version - len(life.learner.batches)
    for version, batch in enumerate(life.learner.batches, start=first):
        for sequence in batch:
            sampled = {(int(token) - 256) // 1000 for token in sequence.tokens[sequence.mask] if token >= 256}
            assert all(0 <= version - old <= life.plan.max_staleness for old in sampled)
