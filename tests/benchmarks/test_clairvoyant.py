"""The bound of the idle benchmark, against every schedule of small traces."""

from __future__ import annotations

import random

import pytest

from benchmarks.clairvoyant import Trace, earliest_end
from tests.benchmarks.exhaustive import best_end


def _trace(seed: int, *, queues: bool) -> Trace:
    draw = random.Random(seed)
    groups_per_step = draw.choice([1, 2])
    max_staleness = draw.choice([0, 1, 2])
    steps = 5 if groups_per_step == 1 else 4 if max_staleness < 2 else 3
    group_size = draw.choice([1, 2])
    slots = draw.randint(groups_per_step, (1 + max_staleness) * groups_per_step)
    return Trace(
        # Sixteenths, so that sums are exact.
        durations_s=[
            [draw.choice([1, 2, 3, 5, 40, 100]) / 16 for _ in range(group_size)] for _ in range(steps * groups_per_step)
        ],
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        slots=slots,
        concurrency=draw.randint(1, max(1, slots * group_size - 1)) if queues else slots * group_size,
        step_s=draw.choice([1, 8, 16]) / 16,
        publication_s=[draw.choice([1, 4, 32]) / 16 for _ in range(steps)],
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_best_of_all_schedules_ends_at_the_bound(seed: int) -> None:
    """Without a queue some schedule reaches the bound, and none is better."""
    trace = _trace(seed, queues=False)
    assert earliest_end(trace) == best_end(trace)


@pytest.mark.parametrize("seed", [*range(60), 3431])
def test_no_schedule_beats_the_bound_when_trajectories_queue(seed: int) -> None:
    """The bound is never too late, although groups may be born after their admission (in the last one that helps)."""
    trace = _trace(seed, queues=True)
    assert earliest_end(trace) <= best_end(trace)


def test_the_bound_is_mostly_reached_when_trajectories_queue() -> None:
    """It may be too early, but hardly ever is in small traces."""
    traces = [_trace(seed, queues=True) for seed in range(60)]
    assert [earliest_end(trace) == best_end(trace) for trace in traces].count(False) <= 1


def test_a_synchronous_trace_ends_after_all_of_its_times() -> None:
    """The example of ``Trace``: each step waits for its group, and the next group for the publication."""
    trace = Trace(
        durations_s=[[1.0, 3.0], [2.0, 2.0]],
        groups_per_step=1,
        max_staleness=0,
        slots=1,
        concurrency=2,
        step_s=0.5,
        publication_s=[0.25, 0.25],
    )
    assert earliest_end(trace) == 3 + 0.5 + 0.25 + 2 + 0.5


def test_a_group_that_is_due_is_waited_for() -> None:
    """Two groups of the first two are enough for the first step, but the slow one is due at the second."""
    trace = Trace(
        durations_s=[[9.0], [1.0], [1.0]],
        groups_per_step=1,
        max_staleness=1,
        slots=2,
        concurrency=2,
        step_s=1.0,
        publication_s=[0.125] * 3,
    )
    assert earliest_end(trace) == 9 + 1 + 1
