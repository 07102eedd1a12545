"""Which version samples next, and on whose prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scheduling.rules import KVCache
from asyncrl.scheduling.versions import Placement, place

HOLD = KVCache(max_staleness=1)
REFILL = KVCache(max_staleness=1, on_limit="refill", allow_reprefill=True)


@pytest.mark.parametrize("rule", [None, HOLD, REFILL])
def test_the_first_segment_uses_the_newest_version(rule: KVCache | None) -> None:
    """And computes its own prefix."""
    assert place(None, 4, rule) == Placement(version=4, anchor=4)


def test_without_a_rule_a_trajectory_keeps_its_version() -> None:
    """That is pinning."""
    assert place(Placement(version=4, anchor=4), 9, None) == Placement(version=4, anchor=4)


@pytest.mark.parametrize("rule", [HOLD, REFILL])
def test_within_the_bound_it_moves_and_keeps_its_prefix(rule: KVCache) -> None:
    """The anchor stays: a second move within the bound is measured from the same prefix."""
    assert place(Placement(version=4, anchor=4), 5, rule) == Placement(version=5, anchor=4)


def test_at_the_limit_hold_samples_on_and_refill_starts_anew() -> None:
    """The worked example."""
    at_limit = Placement(version=5, anchor=4)
    assert place(at_limit, 6, HOLD) == at_limit
    assert place(at_limit, 6, REFILL) == Placement(version=6, anchor=6)


def test_what_arrives_counts_already_if_it_may_sample_the_request() -> None:
    """A request that leaves during the update to 6 does not reuse the prefix of 4, nor does it wait for 6."""
    at_limit = Placement(version=5, anchor=4)
    assert place(at_limit, 5, REFILL) == at_limit
    assert place(at_limit, 5, REFILL, arriving=6) == Placement(version=5, anchor=5)


@given(
    st.integers(0, 3),
    st.sampled_from(["hold", "refill"]),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)
def test_a_reused_prefix_is_never_older_than_the_bound(bound: int, limit: str, steps: list[int]) -> None:
    """Whatever is published in between; versions never go back, and refill always samples with the newest."""
    rule = KVCache(max_staleness=bound, on_limit=limit, allow_reprefill=True)  # type: ignore[arg-type]
    published = 0
    placement = place(None, published, rule)
    for step in steps:
        published += step
        before, placement = placement, place(placement, published, rule)
        assert 0 <= placement.version - placement.anchor <= bound
        assert before.version <= placement.version <= published
        assert limit == "hold" or placement.version == published
