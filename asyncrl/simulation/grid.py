"""The points of a simulation: which schedules are compared.

Two points can admit exactly the same: slots are bounded by ``max_staleness`` however large ``admit_ahead`` and
``oversample_factor`` are, and no more trajectories run than slots have members. Such points are simulated once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

from asyncrl.recipe.config import Recipe
from asyncrl.scheduling.rules import Schedule

__all__ = ["Admits", "Axes", "Point", "default_grid", "recipe_point"]

Admits: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One schedule."""

    max_staleness: int
    admit_ahead: int
    concurrency: int
    oversample_factor: float

    def schedule(self, recipe: Recipe) -> Schedule:
        """The recipe's schedule with this point's values."""
        return replace(
            recipe.schedule,
            concurrency=self.concurrency,
            admit_ahead=self.admit_ahead,
            oversample_factor=self.oversample_factor,
        )

    def admits(self, recipe: Recipe) -> Admits:
        """The bound, the slots, and the trajectories that can be active: points with the same are the same."""
        trainer = recipe.trainer
        slots = self.schedule(recipe).slots(groups_per_step=trainer.groups_per_step, max_staleness=self.max_staleness)
        return self.max_staleness, slots, min(self.concurrency, slots * trainer.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values of a grid that the user gave; None: only the recipe's."""

    max_staleness: Sequence[int] | None = None
    admit_ahead: Sequence[int] | None = None
    concurrency: Sequence[int] | None = None
    oversample_factor: Sequence[float] | None = None

    @property
    def given(self) -> bool:
        """True if there is any."""
        return any(values is not None for values in (self._values().values()))

    def points(self, recipe: Recipe) -> list[Point]:
        """The recipe's own point, then every combination."""
        own = recipe_point(recipe)
        values = {key: [getattr(own, key)] if given is None else given for key, given in self._values().items()}
        combinations = [Point(**dict(zip(values, chosen, strict=True))) for chosen in product(*values.values())]
        return list(dict.fromkeys([own, *combinations]))

    def _values(self) -> Mapping[str, Sequence[Any] | None]:
        return {
            "max_staleness": self.max_staleness,
            "admit_ahead": self.admit_ahead,
            "concurrency": self.concurrency,
            "oversample_factor": self.oversample_factor,
        }


def recipe_point(recipe: Recipe) -> Point:
    """What the recipe itself says."""
    return Point(
        max_staleness=recipe.trainer.max_staleness,
        admit_ahead=recipe.schedule.admit_ahead,
        concurrency=recipe.schedule.concurrency,
        oversample_factor=recipe.schedule.oversample_factor,
    )


def default_grid(recipe: Recipe) -> list[Point]:
    """The recipe's own point first, then others around it that all admit something different."""
    chosen: dict[Admits, Point] = {}
    for point in _candidates(recipe):
        chosen.setdefault(point.admits(recipe), point)
    return list(chosen.values())


def _candidates(recipe: Recipe) -> Iterator[Point]:
    own = recipe_point(recipe)
    plain = replace(own, oversample_factor=1.0)
    bound = own.max_staleness or 2
    yield own
    yield replace(plain, max_staleness=0)
    for other in sorted({1, 2, bound, 4, 2 * bound}):
        yield replace(plain, max_staleness=other, admit_ahead=other)
    yield replace(plain, max_staleness=bound, admit_ahead=bound - 1)
    yield replace(plain, max_staleness=bound, admit_ahead=bound - 1, oversample_factor=1.25)
    _, _, active = own.admits(recipe)
    for concurrency in (active // 4, active // 2, 2 * active):
        yield replace(own, concurrency=max(1, concurrency))
