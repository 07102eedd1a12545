"""Where the time of a step goes: every second to its true cause, compared with an account that reads events only."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, get_args

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.events import (
    BatchTaken,
    ChunkTrained,
    Event,
    GroupAdmitted,
    GroupFinished,
    LearnerStepped,
    StepFinished,
    VersionCommitted,
    VersionPublished,
)
from asyncrl.testing import ScriptedLearner, ScriptedPublisher, ScriptedSampler
from asyncrl.training.step import Phase
from asyncrl.types import Message, Trajectory
from tests.faults.case import Case, One

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")

_STEPS = 6


@dataclass
class _Account:
    """Holds the slots of a run as its events tell, and enters the time between two events."""

    slots: int
    per_step: int
    wanted: int
    """Groups in all."""
    admitted: int = 0
    ready: int = 0
    outstanding: int = 0
    taken: Counter[int] = field(default_factory=Counter)
    """Step -> groups of its batch that still hold their slots."""
    version_of: dict[int, int] = field(default_factory=dict)
    """Version -> step that made it."""
    committed: int = 0
    n: int = 1
    phase: str = "wait"
    now: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[dict[str, float]] = field(default_factory=list)

    def observe(self, event: Event) -> None:
        self.seconds[self._cause()] += event.time - self.now
        self.now = event.time
        match event:
            case GroupAdmitted():
                self.admitted += 1
                self.outstanding += 1
            case GroupFinished():
                self.ready += 1
            case BatchTaken():
                self.ready -= len(event.groups)
                self.outstanding -= len(event.groups)
                self.taken[event.n] += len(event.groups)
                self.phase = "forward_backward"
            case ChunkTrained():
                self.phase = "optimizer" if self.taken[event.n] == self.per_step else "wait"
            case LearnerStepped():
                self.phase = "publication"
            case VersionCommitted():
                self.version_of[event.version] = self.n
            case VersionPublished():
                for version in [version for version in self.version_of if version <= event.version]:
                    del self.taken[self.version_of.pop(version)]
            case StepFinished():
                self.steps.append(self.seconds)
                self.seconds = defaultdict(float)
                self.n += 1
                self.phase = "wait"

    def _cause(self) -> str:
        """Of this moment."""
        if self.phase != "wait":
            return self.phase
        missing = self.per_step - self.taken[self.n]
        if self.ready >= missing:
            return "barrier"
        full = self.outstanding + self.taken.total() == self.slots
        if self.outstanding < missing and full and self.admitted < self.wanted:
            return "publication"
        return "wait_for_samples"


class _Slow(One):
    """A turn that takes as long as the test wants."""

    open = 0
    seconds: Any = None

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        await anyio.sleep(type(self).seconds())
        return None


def _durations(kind: str, seed: int) -> Any:
    chance = random.Random(seed)
    return {
        "none": lambda: 0.0,
        "short": lambda: chance.choice([0.5, 1.0, 2.0]),
        "long": lambda: chance.choice([20.0, 40.0, 80.0]),
        "mixed": lambda: chance.choice([0.0, 1.0, 1.0, 1.0, 50.0]),
    }[kind]


_KINDS = st.sampled_from(["none", "short", "long", "mixed"])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    delays=st.tuples(_KINDS, _KINDS, _KINDS),
    training=st.sampled_from([0.0, 1.0, 30.0]),
    per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    admit_ahead=st.integers(0, 3),
    oversample=st.sampled_from([1.0, 1.3, 2.0]),
    chunk=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_each_second_of_a_step_has_its_cause(
    delays: tuple[str, str, str],
    training: float,
    per_step: int,
    max_staleness: int,
    admit_ahead: int,
    oversample: float,
    chunk: bool,
    seed: int,
) -> None:
    """Slow publications, samplers, tools and learners, whole batches and chunks; the phases sum to the wall time."""
    sampling, publishing, _Slow.seconds = (_durations(kind, seed + number) for number, kind in enumerate(delays))
    schedule = rl.Schedule(
        concurrency=100, admit_ahead=admit_ahead, oversample_factor=oversample if max_staleness else 1.0
    )
    chunks = rl.ForwardBackwardBatch(min_sequences=2) if chunk and max_staleness == 0 else None
    case = Case(
        _Slow,
        sampler=ScriptedSampler(seconds=lambda request: sampling()),
        learner=ScriptedLearner(train_s=training, step_s=training / 4),
        publisher=ScriptedPublisher(seconds=publishing),
        engine={"schedule": schedule, "environment_timeout": 1e6},
        groups_per_step=per_step,
        max_staleness=max_staleness,
        forward_backward_batch=chunks,
    )
    account = _Account(
        slots=schedule.slots(groups_per_step=per_step, max_staleness=max_staleness),
        per_step=per_step,
        wanted=_STEPS * per_step,
    )
    case.bus.subscribe(account.observe)
    case.play(_STEPS, 5)
    assert len(case.steps) == len(account.steps) == _STEPS
    begun = next(event.time for event in case.of(GroupAdmitted))
    account.steps[0]["wait_for_samples"] -= begun  # before the run
    for event, booked in zip(case.of(StepFinished), account.steps, strict=True):
        measured = {phase: event.metrics[f"train/{phase}_seconds"] for phase in get_args(Phase)}
        assert measured == pytest.approx({phase: booked[phase] for phase in get_args(Phase)}, abs=1e-6), event.n
        assert event.metrics["train/batch_seconds"] == pytest.approx(event.time - begun, abs=1e-6)
        begun = event.time


def test_slow_publications_are_not_called_samples() -> None:
    """They take 40 seconds and nothing else does: with one extra group sampled ahead, too, not a second of samples."""
    for oversample in (1.0, 1.25):
        case = Case(
            publisher=ScriptedPublisher(seconds=lambda: 40.0),
            engine={"schedule": rl.Schedule(admit_ahead=1, oversample_factor=oversample)},
            groups_per_step=4,
            max_staleness=2,
        )
        case.play(15, 4)
        totals = {
            phase: sum(step.metrics[f"train/{phase}_seconds"] for step in case.steps) for phase in get_args(Phase)
        }
        assert totals.pop("publication") >= 300.0
        assert set(totals.values()) == {0.0}
