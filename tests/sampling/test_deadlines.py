"""How long a request may take: finite whatever is known, and long enough for whoever is only slow."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.sampling.deadlines import LEAST_S, Evidence, Pace, allowed_s, evidence, work_of
from asyncrl.sampling.replies import Load


def _pace(*answers: tuple[float, float]) -> Pace:
    pace = Pace()
    for seconds, work in answers:
        pace.saw(seconds, work)
    return pace


@pytest.mark.parametrize(
    ("answers", "work", "found", "expected"),
    [
        ([(50, 1000), (50, 1000)], 1000, None, 120 + 3 * (50 + 50)),
        ([(50, 1000)], 1000, Evidence(counted=False), 120 + 3 * (50 + 50)),
        ([(50, 1000)], 1000, Evidence(counted=True), 4 * (120 + 3 * (50 + 50))),
        ([(50, 1000)], 1000, Evidence(counted=True, seconds_per_token=2.0), 4 * (120 + 3 * (50 + 2000))),
        ([(50, 1000)], 1000, Evidence(counted=True, seconds_per_token=0.001), 4 * (120 + 3 * (50 + 50))),
        ([], 1000, None, 600 + 1000),
        ([], 30_000, Evidence(counted=True), 4 * (600 + 30_000)),
        ([], 1000, Evidence(counted=False, seconds_per_token=2.0), 120 + 3 * 2000),
    ],
)
def test_the_rule(answers: list[tuple[float, float]], work: float, found: Evidence | None, expected: float) -> None:
    """Worked examples: several times what the server took, several times that again if it counts the request."""
    assert allowed_s(work, _pace(*answers), found) == pytest.approx(expected)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0.1, 1e6)), max_size=20),
    st.floats(0, 1e6),
    st.booleans(),
    st.none() | st.floats(0, 1e4),
)
def test_it_is_finite_never_short_and_grows_with_the_work(
    answers: list[tuple[float, float]], work: float, counted: bool, told_s: float | None
) -> None:
    """Whatever was seen, and whatever the server says about itself."""
    pace, found = _pace(*answers), Evidence(counted=counted, seconds_per_token=told_s)
    allowed = allowed_s(work, pace, found)
    assert LEAST_S <= allowed < math.inf
    assert allowed <= allowed_s(work + 1, pace, found)
    assert allowed_s(work, pace, Evidence(counted=False, seconds_per_token=told_s)) <= allowed


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.floats(-4, 2).map(lambda exponent: 10.0**exponent),
    st.floats(0.0, 300.0),
    st.integers(0, 60),
    st.integers(1, 30_000),
    st.integers(0, 2**16),
)
def test_an_honest_server_is_never_cut_whatever_its_speed(
    seconds_per_token: float, waits_s: float, finished: int, longest: int, seed: int
) -> None:
    """From a tenth of a millisecond to a hundred seconds for a token, with a queue, and with answers of any length.

    A server that finished something is measured by that; of one that did not, its report of what runs tells.
    """
    rng = random.Random(seed)
    pace = Pace()
    for _ in range(finished):
        tokens = rng.randint(1, longest)
        pace.saw(rng.uniform(0.0, waits_s) + tokens * seconds_per_token * rng.uniform(0.7, 1.3), work_of(100, tokens))
    load = Load(running=3, waiting=0, tokens_per_second=3 / seconds_per_token)
    honest_s = waits_s + longest * seconds_per_token * 1.3
    assert honest_s < allowed_s(work_of(100, longest), pace, evidence(load, 3))


@pytest.mark.parametrize(
    ("load", "ours", "counted", "told_s"),
    [
        (None, 3, True, None),
        (Load(running=3, waiting=0), 3, True, None),
        (Load(running=0, waiting=3), 3, True, None),
        (Load(running=2, waiting=0), 3, False, None),
        (Load(running=3, waiting=0, tokens_per_second=6.0), 3, True, 0.5),
        (Load(running=3, waiting=0, tokens_per_second=0.0), 3, False, None),
        (Load(running=0, waiting=3, tokens_per_second=0.0), 3, True, None),
    ],
)
def test_what_a_load_says(load: Load | None, ours: int, counted: bool, told_s: float | None) -> None:
    """Requests that it does not count, or that run without a token, are not vouched for."""
    assert evidence(load, ours) == Evidence(counted=counted, seconds_per_token=told_s)


def test_the_past_is_forgotten() -> None:
    """One bad hour does not make a hang of the next day look honest."""
    pace = _pace((3600, 100), *[(1.0, 100)] * 400)
    assert pace.slowest_s < 2
    assert pace.seconds_per_token == pytest.approx(0.01, rel=0.2)
