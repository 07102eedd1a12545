"""The real trainer on the virtual clock, against every schedule of small workloads."""

from __future__ import annotations

import random

import pytest

from benchmarks.workloads import Turns, Workload, run
from tests.benchmarks.exhaustive import best_end


def _turns(group: random.Random, member: random.Random) -> Turns:
    return [(member.choice([0.1, 0.3, 2.0, 6.0]) * member.uniform(0.9, 1.1), 0.0)]


def _workload(seed: int) -> Workload:
    draw = random.Random(seed)
    groups_per_step = draw.choice([1, 2])
    max_staleness = draw.choice([0, 1, 2])
    return Workload(
        name="small",
        turns=_turns,
        max_staleness=max_staleness,
        admit_ahead=draw.randint(0, max_staleness),
        oversample_factor=draw.choice([1.0, 1.5]) if max_staleness else 1.0,
        concurrency=draw.randint(2, 2 * (1 + max_staleness) * groups_per_step),
        step_s=draw.choice([0.1, 1.0]),
        publication=lambda draw: draw.choice([0.1, 4.0]) * draw.uniform(0.9, 1.1),
        groups_per_step=groups_per_step,
        group_size=2,
        steps=5 if groups_per_step == 1 else 4 if max_staleness < 2 else 3,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(80))
def test_no_schedule_is_better_than_the_trainer(seed: int) -> None:
    """Stragglers, slow publications and too little room: the trainer is as quick as one that knows what will come."""
    workload = _workload(seed)
    assert run(workload).end_s == pytest.approx(best_end(workload.trace()))


def test_the_trace_of_a_workload_is_the_same_each_time() -> None:
    """Durations depend on the seed, the group and the member, not on the order in which they are drawn."""
    assert _workload(1).trace() == _workload(1).trace()
    assert _workload(1).trace() != _workload(2).trace()


def test_an_outcome_tells_busy_and_idle_time() -> None:
    """A synchronous run is busy for its steps, and idle for the rest."""
    workload = Workload(name="one", turns=lambda group, member: [(3.0, 0.0)], max_staleness=0, steps=2)
    outcome = run(workload)
    assert outcome.end_s == pytest.approx(2 * (3.0 + 1.0) + 0.1)
    assert outcome.busy_s == pytest.approx(2.0)
    assert outcome.idle == pytest.approx(1 - 2.0 / 8.1)
    assert outcome.barrier_s == 0.0
