from __future__ import annotations

import random

import numpy as np
import pytest

from asyncrl.simulation.cost import InFlight, ShuffledRatios, fit_cost, fit_load


def test_a_load_model_is_recovered_from_what_it_made() -> None:
    """Latency, decoding, prefill and the shared parts of the last two, each from one request in a thousand."""
    random_state = np.random.default_rng(0)
    tokens = random_state.integers(1, 1000, 1000)
    uncached = random_state.integers(0, 4000, 1000)
    in_flight = random_state.uniform(1, 200, 1000)
    sizes = np.stack([np.ones(1000), tokens, uncached], axis=1)
    own, shared = np.array([0.05, 0.01, 0.0]), np.array([0.0, 0.0002, 0.00003])
    model = fit_load(sizes, sizes @ own + in_flight * (sizes @ shared), in_flight)
    assert model.own == pytest.approx(own, abs=1e-9)
    assert model.shared == pytest.approx(shared, abs=1e-9)
    assert model.parts(1, 100, 10) == pytest.approx((1.05, 0.0203))
    assert model.ratios == pytest.approx([1.0] * len(model.ratios))


def test_nothing_becomes_quicker_by_having_more_to_do() -> None:
    """Measured times that fall with size are the fault of something else."""
    sizes = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit_cost(sizes, np.array([3.0, 2.0, 1.0]), busy=np.zeros(3)).coefficients == pytest.approx((2.0, 0.0))


def test_what_never_varies_is_explained_by_the_fewest_numbers() -> None:
    """A constant size could stand in the place of the constant: only one of them gets it."""
    cost = fit_cost(np.full((5, 2), 4.0), np.full(5, 8.0), busy=np.ones(5))
    assert sorted(cost.coefficients) == pytest.approx([0.0, 2.0])


def test_expected_seconds_and_ratios_keep_what_was_measured() -> None:
    """Sums agree, and so does the spread: the mean of the ratios is 1."""
    sizes = np.array([[1.0, size] for size in range(1, 101)])
    seconds = sizes @ [1.0, 2.0] * np.random.default_rng(1).lognormal(0, 1, 100)
    cost = fit_cost(sizes, seconds, busy=np.ones(100))
    assert sum(cost.seconds(*row) for row in sizes) == pytest.approx(seconds.sum())
    assert len(cost.ratios) == 8
    assert sum(cost.ratios) == pytest.approx(8)
    assert max(cost.ratios) > 2


def test_work_beside_requests_is_told_from_work_alone() -> None:
    """A learner that shares its cores: 2 s a pass alone, a third of that pace while requests are in flight."""
    busy = np.array([1.0] * 20 + [0.9, 0.5, 0.0, 0.0])
    pace = 1 - busy + busy / 3
    noise = np.random.default_rng(2).lognormal(0, 0.2, len(busy))
    cost = fit_cost(np.ones((len(busy), 1)), 2.0 / pace * noise, busy=busy)
    assert cost.speed == pytest.approx(1 / 3, rel=0.2)
    assert cost.seconds(1) == pytest.approx(2.0, rel=0.25)


def test_a_learner_of_its_own_works_at_one_pace() -> None:
    """Chance alone does not look like another speed, and neither does a run that never says."""
    noise = np.random.default_rng(2).lognormal(0, 0.2, 24)
    some = np.array([1.0] * 20 + [0.9, 0.5, 0.0, 0.0])
    for busy in (some, np.ones(24), np.zeros(24)):
        cost = fit_cost(np.ones((24, 1)), 2.0 * noise, busy=busy)
        assert cost.speed == 1.0
        assert cost.seconds(1) == pytest.approx(2.0 * noise.mean())


def test_a_fit_to_nothing_costs_nothing() -> None:
    """A run that published nothing says nothing about it."""
    none = np.empty((0, 2))
    assert fit_cost(none, np.empty(0), busy=np.empty(0)).coefficients == (0.0, 0.0)
    assert fit_load(none, np.empty(0), np.empty(0)).shared == (0.0, 0.0)


def test_requests_in_flight_are_counted_over_time() -> None:
    """Two overlap for two of four seconds; in between and after there is one, and none."""
    open_requests = InFlight(np.array([0.0, 2.0]), np.array([4.0, 6.0]))
    means = open_requests.mean(np.array([0.0, 2.0, 5.0, 5.0, 7.0]), np.array([4.0, 6.0, 6.0, 7.0, 8.0]))
    assert means == pytest.approx([1.5, 1.5, 1.0, 0.5, 0.0])
    busy = open_requests.busy(np.array([0.0, 5.0, 7.0]), np.array([4.0, 7.0, 8.0]))
    assert busy == pytest.approx([1.0, 0.5, 0.0])
    nothing = InFlight(np.empty(0), np.empty(0))
    assert nothing.mean(np.array([0.0]), np.array([1.0])) == pytest.approx([0.0])


def test_a_deck_draws_every_ratio_before_any_again() -> None:
    """So the mean is exact after each round; the order is the seed's."""
    ratios = [0.5, 1.0, 1.5, 3.0]
    deck = ShuffledRatios(ratios, random.Random(3))
    rounds = [[deck.draw() for _ in ratios] for _ in range(3)]
    assert [sorted(drawn) for drawn in rounds] == [ratios] * 3
    assert rounds[0] != rounds[1] or rounds[1] != rounds[2]
    again = ShuffledRatios(ratios, random.Random(3))
    assert [again.draw() for _ in range(12)] == [ratio for drawn in rounds for ratio in drawn]
