from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.learning.base import OptimizerSettings
from asyncrl.learning.options import Adam, RateCurve, constant, cosine, linear
from asyncrl.testing import ByteRenderer, scripted_policy
from tests.faults.case import One


def test_a_constant_rate_is_the_default() -> None:
    """Every number reaches the learner as it was given."""
    adam = Adam(lr=0.1, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.2, grad_clip_norm=3.0)
    expected = OptimizerSettings(lr=0.1, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.2, grad_clip_norm=3.0)
    assert adam.settings(0, 10) == adam.settings(9, 10) == expected


def test_cosine_falls_from_one_to_the_floor() -> None:
    """Half a cosine over the steps: 1 first, the middle halfway, the floor where one more step would be."""
    schedule = cosine(floor=0.2)
    assert [schedule(n, 4) for n in (0, 2)] == pytest.approx([1.0, 0.6])
    assert [schedule(n, 4) for n in (3, 9)] == pytest.approx([0.2 + 0.8 * (1 + math.cos(math.pi * 3 / 4)) / 2] * 2)
    assert cosine()(99_999, 100_000) < 1e-9


def test_linear_falls_from_one_to_the_floor() -> None:
    """In equal parts; the floor is where one more step would be."""
    assert [linear(floor=0.2)(n, 4) for n in range(4)] == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert [linear()(n, 2) for n in range(4)] == [1.0, 0.5, 0.5, 0.5]


def test_constant_stays_after_its_warm_up() -> None:
    """To the end and beyond."""
    assert [constant(warmup=2)(n, 4) for n in range(6)] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    floor=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_every_step_has_a_learning_rate(
    kind: Literal["constant", "linear", "cosine"], steps: int, warmup: int, floor: float
) -> None:
    """Above 0 and at most the full one, rising and then falling, also for steps that a longer run took before."""
    adam = Adam(lr=0.5, schedule=RateCurve(kind=kind, warmup=warmup, floor=floor))
    adam.check_schedule(steps)
    rates = [adam.settings(n, steps).lr for n in range(steps + 3)]
    assert all(0 < rate <= 0.5 for rate in rates)
    top = min(warmup, len(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(rate >= 0.5 * floor for rate in rates[top:])


def test_warm_up_is_linear_and_its_first_step_is_not_zero() -> None:
    """Four steps of warm-up, then the cosine from its top."""
    schedule = cosine(warmup=4)
    assert [schedule(n, 8) for n in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_run_that_is_no_longer_than_its_warm_up() -> None:
    """No division by zero."""
    assert [cosine(warmup=2)(n, 2) for n in range(3)] == [0.5, 1.0, 1.0]


def test_the_schedule_scales_the_rate() -> None:
    """By a factor."""
    assert Adam(lr=0.5, schedule=lambda n, steps: n / steps).settings(2, 4).lr == 0.25


@pytest.mark.parametrize("wrong", [-0.1, 0.0, math.nan, math.inf, 1e-324])
def test_a_step_without_a_rate_is_refused_before_the_first(wrong: float) -> None:
    """Whichever step it is: it would publish a version that is equal to the one before."""
    for bad in (0, 2, 3):
        adam = Adam(lr=0.5, schedule=lambda n, steps, bad=bad: wrong if n == bad else 1.0)
        with pytest.raises(ConfigError, match=rf"optimizer\.schedule\({bad}, 4\) is"):
            adam.check_schedule(4)


def test_a_run_with_such_a_step_does_not_begin() -> None:
    """The error comes from ``run`` itself, when nothing has been sampled."""
    engine = rl.RolloutEngine(scripted_policy(), env=One, renderer=ByteRenderer())
    falling = Adam(lr=0.1, schedule=lambda n, steps: 1 - n / (steps - 1))
    trainer = rl.AsyncTrainer(engine=engine, optimizer=falling, groups_per_step=1, group_size=2, max_staleness=0)
    with pytest.raises(ConfigError, match=r"optimizer\.schedule\(3, 4\) is 0\.0"):
        trainer.run([1], steps=4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": math.inf},
        {"lr": math.nan},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": 0.0},
        {"weight_decay": -1.0},
        {"grad_clip_norm": 0.0},
    ],
)
def test_wrong_numbers_are_refused(wrong: Mapping[str, Any]) -> None:
    """The message names the option."""
    with pytest.raises(ConfigError, match=rf"optimizer\.{next(iter(wrong))} is"):
        Adam(**{"lr": 1e-3, **wrong})


def test_wrong_schedules_are_refused() -> None:
    """A warm-up is a count, a floor a part of the rate."""
    with pytest.raises(ConfigError, match=r"optimizer\.warmup is -1"):
        cosine(warmup=-1)
    with pytest.raises(ConfigError, match=r"optimizer\.floor is 1\.5"):
        cosine(floor=1.5)
