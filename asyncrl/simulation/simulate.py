"""One simulated run: the real engine and trainer on a virtual clock, with a policy that only takes time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, get_args

from asyncrl.errors import ConfigError
from asyncrl.events import Event, Events, StepFinished
from asyncrl.observe.metrics import percentile
from asyncrl.publishing.policy import Policy
from asyncrl.rollout.engine import RolloutEngine
from asyncrl.rollout.groupplan import derived
from asyncrl.simulation.grid import Point, RunOptions
from asyncrl.simulation.parts import (
    CountingRenderer,
    Playback,
    ScriptedEnv,
    SimulatedLearner,
    SimulatedPublisher,
    SimulatedSampler,
)
from asyncrl.simulation.workload import GroupScript, StepEnd, Workload, around_steady, steady_steps, steps_per_hour
from asyncrl.testing.clock import run_virtual
from asyncrl.training.step import Phase
from asyncrl.training.trainer import AsyncTrainer
from asyncrl.types import SpanKind, Step

__all__ = ["Outcome", "Simulation", "total_steps"]

Ages: TypeAlias = Counter[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a point achieves in its steady state."""

    point: Point
    steps: int
    """That were counted."""
    steps_per_hour: float
    shares: dict[Phase, float]
    """Of the trainer's time; they sum to 1."""
    age_mean: float
    """Of trained tokens, in versions."""
    age_p99: int
    tokens_per_second: float
    """Trained, prompts not counted."""

    @property
    def training_share(self) -> float:
        """Part of the time in which the trainer works."""
        return self.shares["forward_backward"] + self.shares["optimizer"]

    @property
    def parts(self) -> tuple[float, ...]:
        """Parts of the time: training, waiting for samples, at the barrier, and publishing."""
        return self.training_share, *(self.shares[name] for name in ("wait_for_samples", "barrier", "publication"))


def total_steps(steps: int, max_staleness: int) -> int:
    """How long a run must be for ``steps`` steady ones."""
    return steps + sum(around_steady(max_staleness))


class Simulation:
    """A run that is ready to start. Making it raises ``ConfigError`` for what the engine or the trainer refuses."""

    def __init__(self, run: RunOptions, point: Point, workload: Workload, *, steps: int, seed: int) -> None:
        self.point = point
        self._total = total_steps(steps, point.max_staleness)
        before, after = around_steady(point.max_staleness)
        _, size, _ = run.shape
        self._rows = workload.rows(before=before * size, counted=steps * size, after=after * size)
        self._trainer = _trainer(run, point, workload, self._rows, seed)
        self._log = _StepLog()
        self.events.subscribe(self._log.observe)

    @property
    def events(self) -> Events:
        """What happens in the run, as in a real one."""
        return self._trainer.events

    def run(self) -> Outcome:
        """Simulate. It can be called once."""
        run_virtual(self._run)
        return self._log.outcome(self.point)

    async def _run(self) -> None:
        async for step in self._trainer.run(self._rows, steps=self._total):
            self._log.add_ages(step)


@dataclass(slots=True)
class _StepLog:
    """Collects what the outcome is made of."""

    finished: list[StepFinished] = field(default_factory=list)
    ages: list[Ages] = field(default_factory=list)
    _version: int = 0
    # Committed before the step.

    def observe(self, event: Event) -> None:
        """Take note of the end of a step."""
        if isinstance(event, StepFinished):
            self.finished.append(event)

    def add_ages(self, step: Step) -> None:
        """Trained tokens by their age."""
        ages: Ages = Counter()
        for member in step.trajectories:
            for span in member.spans:
                if span.kind is SpanKind.GENERATED and span.version is not None:
                    ages[self._version - span.version] += len(span.tokens)
        self.ages.append(ages)
        self._version = step.model_step

    def outcome(self, point: Point) -> Outcome:
        """Of the steady steps. Raises ``ConfigError`` if no time passed."""
        counted = steady_steps(len(self.finished), point.max_staleness)
        seconds = {
            phase: sum(self.finished[i].metrics[f"train/{phase}_seconds"] for i in counted) for phase in get_args(Phase)
        }
        total = sum(seconds.values())
        rate = steps_per_hour([StepEnd(time=event.time) for event in self.finished], point.max_staleness)
        if rate is None or not total > 0:
            raise ConfigError("nothing in this workload takes time, so that there is no rate to tell")
        ages: Ages = Counter()
        for i in counted:
            ages.update(self.ages[i])
        return Outcome(
            point=point,
            steps=len(counted),
            steps_per_hour=rate,
            shares={phase: spent / total for phase, spent in seconds.items()},
            age_mean=sum(age * tokens for age, tokens in ages.items()) / max(1, ages.total()),
            age_p99=int(percentile(ages, 99)),
            tokens_per_second=ages.total() / total,
        )


def _trainer(run: RunOptions, point: Point, workload: Workload, rows: Sequence[GroupScript], seed: int) -> AsyncTrainer:
    playback = Playback(rows)
    sampler = SimulatedSampler(playback, workload.sampling, source=random.Random(derived(seed, "sampler")))
    station, rank = sampler.station, run.lora_rank
    lead, _ = around_steady(point.max_staleness)
    policy = Policy(
        SimulatedLearner(workload, station, random.Random(derived(seed, "learner")), lora_rank=rank, lead=lead),
        sampler=sampler,
        publisher=SimulatedPublisher(
            workload, station, random.Random(derived(seed, "publisher")), pins_versions=rank is not None, lead=lead
        ),
    )
    engine_options = {
        **run.engine,
        "schedule": point.schedule(run),
        "seed": seed,
        "renderer": CountingRenderer(),
        # A script may wait as long as it likes.
        "environment_timeout": float("inf"),
        # And what it is rewarded for is not the question.
        "failures": replace(run.engine["failures"], untrained_batches=0),
    }
    # The rows are exactly what the simulated run needs.
    trainer_options = {**run.trainer, "max_staleness": point.max_staleness, "repeat_dataset": True}
    engine = RolloutEngine(policy, env=ScriptedEnv(playback, reset_s=workload.reset_s), **engine_options)
    return AsyncTrainer(engine=engine, **trainer_options)
