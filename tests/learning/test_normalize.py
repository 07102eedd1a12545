from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learning.losses import Divisor, Normalize, token_weight

GROUPS = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=4)


def _divisor(mode: Normalize, groups: list[list[int]]) -> float:
    divisor = Divisor(mode)
    for group in groups:
        divisor.add(group)
    return divisor.value


@pytest.mark.parametrize(
    ("mode", "factor"), [("token", 1 / 80), ("sequence", 1 / 120), ("prompt", 1 / 80), ("batch", 1 / 4), ("sum", 1.0)]
)
def test_factor_of_one_token(mode: Normalize, factor: float) -> None:
    """A token of the trajectory with 30 tokens, in groups with 10 and 30, and 20 and 20 tokens."""
    weight = token_weight(mode, tokens=30, group_tokens=40)
    assert weight / _divisor(mode, [[10, 30], [20, 20]]) == pytest.approx(factor)


@pytest.mark.parametrize(("mode", "value"), [("token", 5), ("sequence", 1), ("prompt", 1), ("batch", 1), ("sum", 1)])
def test_members_without_trained_tokens_are_not_counted(mode: Normalize, value: float) -> None:
    """Neither an empty trajectory nor a group of them is in the divisor."""
    assert _divisor(mode, [[5, 0], [0, 0]]) == value


@pytest.mark.parametrize("mode", get_args(Normalize))
def test_an_empty_batch_divides_by_one(mode: Normalize) -> None:
    """Never by zero."""
    assert _divisor(mode, []) == 1.0


@given(GROUPS, st.sampled_from(get_args(Normalize)))
def test_the_weights_of_all_tokens_have_a_known_sum(groups: list[list[int]], mode: Normalize) -> None:
    """1 for the means over tokens, sequences and prompts; the mean length for batch; the token count for sum."""
    tokens = sum(map(sum, groups))
    if not tokens:
        return
    total = sum(
        count * token_weight(mode, tokens=count, group_tokens=sum(group))
        for group in groups
        for count in filter(None, group)
    )
    trajectories = sum(count > 0 for group in groups for count in group)
    expected = {"batch": tokens / trajectories, "sum": tokens}.get(mode, 1.0)
    assert total / _divisor(mode, groups) == pytest.approx(expected)


@given(GROUPS, st.sampled_from(get_args(Normalize)))
def test_the_divisor_ignores_the_order_of_groups(groups: list[list[int]], mode: Normalize) -> None:
    """Chunks may come in any order."""
    assert _divisor(mode, groups[::-1]) == _divisor(mode, groups)
