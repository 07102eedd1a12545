"""Which rank computes which pass."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learning.ranks.balance import rounds, time_of

COSTS = st.lists(st.floats(1, 100), max_size=12)
RANKS = st.integers(1, 5)


@given(COSTS, RANKS)
def test_every_pass_counts_once_and_every_rank_has_as_many(costs: list[float], ranks: int) -> None:
    """None is left out, none is empty, also with fewer passes than ranks."""
    found = rounds(costs, ranks)
    assert all(len(shares) == ranks for shares in found)
    assert sorted(share.index for shares in found for share in shares if share.counts) == list(range(len(costs)))
    assert len(found) == -(-len(costs) // ranks)


@given(COSTS, RANKS)
def test_repeating_a_pass_makes_no_round_longer(costs: list[float], ranks: int) -> None:
    """The time is that of the costliest pass of each round, those that do not count included."""
    found = rounds(costs, ranks)
    assert sum(max(costs[share.index] for share in shares) for shares in found) == time_of(costs, ranks)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 3))
def test_no_other_division_is_quicker(costs: list[int], ranks: int) -> None:
    """Against all orders of passes, put into rounds one after the other."""
    best = min(
        sum(max(order[start : start + ranks]) for start in range(0, len(order), ranks)) for order in permutations(costs)
    )
    assert time_of(costs, ranks) == best
