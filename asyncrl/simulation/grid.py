"""The points of a simulation: which schedules are compared.

Two points can admit exactly the same: slots are bounded by ``max_staleness`` however large ``admit_ahead`` and
``oversample_factor`` are, and no more trajectories run than slots have members. Such points are simulated once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.rollout.budget import Budget
from asyncrl.scheduling.rules import Schedule

__all__ = ["Admits", "Point", "RunOptions", "default_grid", "given_grid", "own_point"]

Admits: TypeAlias = tuple[int, int, int]
_IN_SCHEDULE = ("admit_ahead", "concurrency", "oversample_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The run of which other schedules are compared."""

    path: Path
    """Of its recipe, which is not read."""
    engine: Mapping[str, Any]
    """All options of ``RolloutEngine`` but the policy and the environment."""
    trainer: Mapping[str, Any]
    """All options of ``AsyncTrainer`` but the engine, the evaluator, the checkpoints and the events."""
    steps: int
    lora_rank: int | None
    """None if all weights are trained."""

    @property
    def name(self) -> str:
        """That of the recipe's folder."""
        return self.path.resolve().parent.name

    @property
    def schedule(self) -> Schedule:
        """How much is in flight."""
        schedule: Schedule = self.engine["schedule"]
        return schedule

    @property
    def budget(self) -> Budget:
        """Of each trajectory."""
        budget: Budget = self.engine["budget"]
        return budget

    @property
    def shape(self) -> tuple[int, int, int]:
        """The bound on staleness, groups of a step and trajectories of a group."""
        return self.trainer["max_staleness"], self.trainer["groups_per_step"], self.trainer["group_size"]

    @property
    def updates(self) -> int:
        """Optimizer steps for a batch."""
        return int(self.trainer.get("minibatches", 1) * self.trainer.get("epochs", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One schedule."""

    max_staleness: int
    admit_ahead: int
    concurrency: int
    oversample_factor: float

    def texts(self) -> dict[str, str]:
        """The values as they are shown."""
        return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in asdict(self).items()}

    def schedule(self, run: RunOptions) -> Schedule:
        """The run's schedule with this point's values."""
        return replace(run.schedule, **{name: getattr(self, name) for name in _IN_SCHEDULE})

    def admits(self, run: RunOptions) -> Admits:
        """The bound, the slots, and the trajectories that can be active: points with the same are the same."""
        _, groups_per_step, group_size = run.shape
        slots = self.schedule(run).slots(
            groups_per_step=groups_per_step, max_staleness=self.max_staleness, updates=run.updates
        )
        return self.max_staleness, slots, min(self.concurrency, slots * group_size)


def own_point(run: RunOptions) -> Point:
    """The schedule of the run itself."""
    return Point(max_staleness=run.shape[0], **{name: getattr(run.schedule, name) for name in _IN_SCHEDULE})


def given_grid(run: RunOptions, axes: Mapping[str, Sequence[float]]) -> list[Point]:
    """The run's own point, then every combination of ``axes``: values by the names of a point's fields."""
    own = own_point(run)
    changes: list[dict[str, Any]] = [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]
    return list(dict.fromkeys([own, *(replace(own, **change) for change in changes)]))


def default_grid(run: RunOptions) -> list[Point]:
    """The run's own point first, then others around it that all admit something different."""
    chosen: dict[Admits, Point] = {}
    for point in (point for point in _candidates(run) if point.max_staleness >= run.updates - 1):
        chosen.setdefault(point.admits(run), point)
    return list(chosen.values())


def _candidates(run: RunOptions) -> Iterator[Point]:
    own = own_point(run)
    plain = replace(own, oversample_factor=1.0)
    bound = own.max_staleness or 2
    yield own
    yield replace(plain, max_staleness=0)
    for other in sorted({1, 2, bound, 4, 2 * bound}):
        yield replace(plain, max_staleness=other, admit_ahead=other)
    yield replace(plain, max_staleness=bound, admit_ahead=bound - 1)
    yield replace(plain, max_staleness=bound, admit_ahead=bound - 1, oversample_factor=1.25)
    _, _, active = own.admits(run)
    for concurrency in (active // 4, active // 2, 2 * active):
        yield replace(own, concurrency=max(1, concurrency))
