from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.learning.base import OptimizerSettings
from asyncrl.learning.optimizer import Adam, cosine


def test_a_constant_rate_is_the_default() -> None:
    """Every number reaches the learner as it was given."""
    adam = Adam(lr=0.1, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.2, grad_clip_norm=3.0)
    expected = OptimizerSettings(lr=0.1, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.2, grad_clip_norm=3.0)
    assert adam.settings(0, 10) == adam.settings(9, 10) == expected


def test_cosine_falls_from_one_to_the_floor() -> None:
    """Half a cosine over the steps: 1 first, the middle halfway, the floor last and after the end."""
    schedule = cosine(floor=0.2)
    assert [schedule(n, 5) for n in (0, 2, 4, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert schedule(1, 5) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


def test_warm_up_is_linear_and_its_first_step_is_not_zero() -> None:
    """Four steps of warm-up, then the cosine from its top."""
    schedule = cosine(warmup=4)
    assert [schedule(n, 8) for n in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_run_that_is_no_longer_than_its_warm_up() -> None:
    """No division by zero."""
    assert [cosine(warmup=2)(n, 2) for n in range(3)] == [0.5, 1.0, 1.0]


def test_the_schedule_scales_the_rate_and_may_stop_it() -> None:
    """A factor of 0 is allowed, anything below is not."""
    assert Adam(lr=0.5, schedule=lambda n, steps: n / steps).settings(2, 4).lr == 0.25
    assert Adam(lr=0.5, schedule=lambda n, steps: 0.0).settings(2, 4).lr == 0.0
    for wrong in (-0.1, math.nan):
        with pytest.raises(ConfigError, match=r"optimizer\.schedule\(2, 4\)"):
            Adam(lr=0.5, schedule=lambda n, steps, wrong=wrong: wrong).settings(2, 4)


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
