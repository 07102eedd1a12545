"""Steps per hour of a run in its steady state, defined once for simulated and for real runs.

Left out: the first ``max_staleness + 1`` steps, whose groups were all admitted before the first one; the last
``max_staleness`` steps, during which nothing is left to admit; and evaluations. A run that is too short for that is
counted whole but for its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StepEnd", "around_steady", "steady_steps", "steps_per_hour"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """A trainer step ended at loop time ``time``; the last ``evaluation_s`` of it were an evaluation."""

    time: float
    evaluation_s: float = 0.0


def around_steady(max_staleness: int) -> tuple[int, int]:
    """Steps before and after the steady ones."""
    return max_staleness + 1, max_staleness


def steady_steps(count: int, max_staleness: int) -> range:
    """Indices of the steps of a run of ``count`` that are counted; empty if there is only one."""
    before, after = around_steady(max_staleness)
    steady = range(before, count - after)
    return steady if steady else range(1, count)


def steps_per_hour(steps: Sequence[StepEnd], max_staleness: int) -> float | None:
    """Of the steady state; None if no time passed in it."""
    counted = steady_steps(len(steps), max_staleness)
    seconds = sum(steps[i].time - steps[i - 1].time - steps[i].evaluation_s for i in counted)
    return 3600 * len(counted) / seconds if seconds > 0 else None
