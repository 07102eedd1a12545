from __future__ import annotations

import pytest

from asyncrl.simulation.workload import StepEnd, steady_steps, steps_per_hour


def test_the_filling_and_the_emptying_of_the_pipeline_are_left_out() -> None:
    """A bound of 2: the first three of ten steps were admitted at the start, in the last two nothing is."""
    assert list(steady_steps(10, 2)) == [3, 4, 5, 6, 7]
    assert list(steady_steps(3, 0)) == [1, 2]


def test_a_short_run_counts_but_for_its_first_step() -> None:
    """And a single step says nothing."""
    assert list(steady_steps(4, 2)) == [1, 2, 3]
    assert list(steady_steps(1, 0)) == []


def test_evaluations_are_left_out() -> None:
    """Steps of 10 s, one of them with 50 s of evaluation after it."""
    ends = [StepEnd(time=time) for time in (100.0, 110.0)]
    ends += [StepEnd(time=170.0, evaluation_s=50.0), StepEnd(time=180.0)]
    assert steps_per_hour(ends, 0) == pytest.approx(360.0)


def test_one_step_has_no_rate() -> None:
    """There is nothing before it to count from."""
    assert steps_per_hour([StepEnd(time=5.0)], 0) is None
