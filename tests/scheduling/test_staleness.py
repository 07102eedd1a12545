"""The barrier's rule against brute force."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.scheduling.staleness import feasible
from tests.scheduling.bruteforce import trainable


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=7),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_feasible_is_exactly_what_some_schedule_can_do(dues: list[int], version: int, groups_per_step: int) -> None:
    """The prefix counts decide the same as trying every assignment of groups to steps."""
    assert feasible(Counter(dues), version=version, groups_per_step=groups_per_step) == trainable(
        dues, version=version, groups_per_step=groups_per_step
    )


def test_groups_due_later_can_make_a_commit_wrong_now() -> None:
    """The worked example: nothing is due now, but four groups cannot fit into one step of two."""
    assert feasible({6: 2, 7: 2}, version=6, groups_per_step=2)
    assert not feasible({6: 4}, version=6, groups_per_step=2)
    assert not feasible({7: 5}, version=6, groups_per_step=2)


def test_a_group_past_its_due_step_is_never_feasible() -> None:
    """Due at 5 and committed 6: too late."""
    assert not feasible({5: 1}, version=6, groups_per_step=8)
    assert feasible({5: 0}, version=6, groups_per_step=8)
