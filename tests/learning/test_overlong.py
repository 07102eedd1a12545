"""The penalty for answers near a length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.learning.overlong import OverlongPenalty


def test_it_grows_in_a_line_over_the_buffer() -> None:
    """The documented example, and a smaller penalty."""
    penalty = OverlongPenalty(max_tokens=100, buffer=20)
    assert [penalty.of(tokens) for tokens in (0, 80, 81, 90, 100, 500)] == [0, 0, -0.05, -0.5, -1, -1]
    assert OverlongPenalty(max_tokens=100, buffer=20, penalty=0.2).of(90) == pytest.approx(-0.1)


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 200), st.floats(0.1, 5))
def test_it_is_bounded_and_never_grows_back(buffer: int, before: int, tokens: int, penalty: float) -> None:
    """Between 0 and the penalty; a longer answer never costs less."""
    overlong = OverlongPenalty(max_tokens=before + buffer, buffer=buffer, penalty=penalty)
    assert -penalty <= overlong.of(tokens + 1) <= overlong.of(tokens) <= 0
    assert overlong.of(before) == 0
    assert overlong.of(before + buffer) == -penalty


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"max_tokens": 0, "buffer": 1}, "max_tokens"),
        ({"max_tokens": 10, "buffer": 0}, "buffer"),
        ({"max_tokens": 10, "buffer": 11}, "buffer"),
        ({"max_tokens": 10, "buffer": 5, "penalty": 0.0}, "penalty"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, int], key: str) -> None:
    """Each message names its option."""
    with pytest.raises(ConfigError, match=rf"overlong\.{key} is"):
        OverlongPenalty(**options)
