"""The barrier's rule against brute force."""

from __future__ import annotations

from collections import Counter
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.scheduling.staleness import feasible


@cache
def _trainable(dues: tuple[int, ...], version: int, groups_per_step: int) -> bool:
    """Brute force: some choice of batches trains every group no later than its due step."""
    if not dues:
        return True
    if min(dues) < version:
        return False
    if len(dues) <= groups_per_step:
        return True
    return any(_trainable(rest, version + 1, groups_per_step) for rest in _rests(tuple(sorted(dues)), groups_per_step))


def _rests(dues: tuple[int, ...], take: int) -> set[tuple[int, ...]]:
    if take == 0:
        return {dues}
    return {rest for i in range(len(dues)) for rest in _rests(dues[:i] + dues[i + 1 :], take - 1)}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=7),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_feasible_is_exactly_what_some_schedule_can_do(dues: list[int], version: int, groups_per_step: int) -> None:
    """The prefix counts decide the same as trying every choice of batches."""
    assert feasible(Counter(dues), version=version, groups_per_step=groups_per_step) == _trainable(
        tuple(sorted(dues)), version, groups_per_step
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
