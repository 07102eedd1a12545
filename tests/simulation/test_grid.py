from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.simulation.grid import Point, default_grid, given_grid, own_point
from tests.simulation.recording import run_options


@pytest.mark.parametrize("bound", [0, 1, 2, 8])
def test_the_default_grid_begins_with_the_recipe_and_never_says_the_same_twice(tmp_path: Path, bound: int) -> None:
    """It has a synchronous point and longer bounds, and each point admits something else."""
    own = run_options(tmp_path, f"trainer.max_staleness={bound}", "schedule.concurrency=16")
    points = default_grid(own)
    assert points[0] == own_point(own)
    assert len({point.admits(own) for point in points}) == len(points)
    assert {0, 1, 2, 4} <= {point.max_staleness for point in points}
    assert 6 <= len(points) <= 12


def test_a_synchronous_point_does_not_oversample(tmp_path: Path) -> None:
    """The trainer would refuse it."""
    own = run_options(tmp_path, "schedule.oversample_factor=1.5")
    assert [point.oversample_factor for point in default_grid(own) if point.max_staleness == 0] == [1.0]


def test_given_values_are_combined_behind_the_recipe(tmp_path: Path) -> None:
    """What is not given stays as the recipe has it, and the recipe's own point is not repeated."""
    own = run_options(tmp_path, "schedule.concurrency=64")
    points = given_grid(own, {"max_staleness": (0, 1), "concurrency": (32, 64)})
    chosen = [(point.max_staleness, point.admit_ahead, point.concurrency) for point in points]
    assert chosen == [(1, 2, 64), (0, 2, 32), (0, 2, 64), (1, 2, 32)]


def test_points_that_admit_the_same_are_told_apart_by_what_they_admit(tmp_path: Path) -> None:
    """The bound caps the slots, and slots cap the active trajectories."""
    own = run_options(tmp_path)

    def admits(ahead: int, concurrency: int, factor: float) -> tuple[int, int, int]:
        point = Point(max_staleness=1, admit_ahead=ahead, concurrency=concurrency, oversample_factor=factor)
        return point.admits(own)

    assert admits(1, 8, 1.0) == admits(5, 100, 2.0) == (1, 4, 8)
    assert admits(0, 8, 1.0) == (1, 2, 4)
    assert admits(1, 7, 1.0) == (1, 4, 7)
