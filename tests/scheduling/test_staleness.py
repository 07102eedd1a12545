"""The barrier's rule against brute force."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.batches import Batches
from asyncrl.scheduling.staleness import batches_ahead, due_step, feasible, needed
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.types import Group
from tests.scheduling.bruteforce import openings, trainable


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=7),
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_feasible_is_exactly_what_some_schedule_can_do(
    dues: list[int], version: int, groups_per_step: int, updates: int
) -> None:
    """The prefix counts decide the same as trying every assignment of groups to batches."""
    found = feasible(Counter(dues), version=version, groups_per_step=groups_per_step, updates=updates)
    assert found == trainable(dues, version=version, groups_per_step=groups_per_step, updates=updates)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 6), max_size=7),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_batches_that_make_fewer_versions_break_nothing(
    dues: list[int], made: list[int], groups_per_step: int, updates: int
) -> None:
    """What the rule allows for batches of so many versions holds for any batches of at most as many."""
    if not feasible(Counter(dues), version=0, groups_per_step=groups_per_step, updates=updates):
        return
    left, version = sorted(dues), 0
    for versions in made:
        batch, left = left[:groups_per_step], left[groups_per_step:]
        assert all(due >= version for due in batch)
        version += min(versions, updates)
        assert feasible(Counter(left), version=version, groups_per_step=groups_per_step, updates=updates)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), max_size=7), st.lists(st.integers(0, 4), max_size=7), st.integers(1, 3))
def test_what_a_batch_takes_is_not_counted(left: list[int], taken: list[int], groups_per_step: int) -> None:
    """Only the groups that stay have to be trained later."""
    assert feasible(
        Counter([*left, *taken]), version=1, groups_per_step=groups_per_step, taken=Counter(taken)
    ) == trainable(left, version=1, groups_per_step=groups_per_step)


def test_groups_due_later_can_make_a_commit_wrong_now() -> None:
    """The worked example: nothing is due now, but four groups cannot fit into one step of two."""
    assert feasible({6: 2, 7: 2}, version=6, groups_per_step=2)
    assert not feasible({6: 4}, version=6, groups_per_step=2)
    assert not feasible({7: 5}, version=6, groups_per_step=2)


def test_a_group_past_its_due_step_is_never_feasible() -> None:
    """Due at 5 and committed 6: too late."""
    assert not feasible({5: 1}, version=6, groups_per_step=8)
    assert feasible({5: 0}, version=6, groups_per_step=8)


def test_updates_of_a_batch_count_as_versions() -> None:
    """The worked example: with two updates a batch and a bound of 5, tokens of version 4 are trained at 8 and 9."""
    assert due_step(4, max_staleness=5, updates=2) == 8
    assert [batches_ahead(bound, 2) for bound in (0, 1, 2, 3, 5)] == [-1, 0, 0, 1, 2]
    assert feasible({8: 6}, version=4, groups_per_step=2, updates=2)
    assert not feasible({8: 7}, version=4, groups_per_step=2, updates=2)
    assert not feasible({8: 5}, version=5, groups_per_step=2, updates=2)


def test_what_has_no_age_leaves_the_places_that_others_need() -> None:
    """The worked example: two of the four that are due at 6 have to go before; one that runs and is due at 5, too."""
    assert needed({6: 4, 7: 2}, version=6, groups_per_step=2) == 2
    assert needed({5: 1, 7: 2}, version=6, groups_per_step=2) == 1
    assert needed({7: 4}, version=6, groups_per_step=2) == 0
    assert needed({}, version=6, groups_per_step=2) == 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 4), max_size=6),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_needed_is_what_the_smallest_batch_must_hold(
    ready: list[int], running: list[int], groups_per_step: int, updates: int
) -> None:
    """Of all batches that may go, with as many groups without an age as one likes, none holds fewer others; and if any
    may go, so may the one of that many earliest due ones."""
    ageless: list[int | None] = [None] * groups_per_step
    allowed = openings([*ready, *ageless], running, version=0, groups_per_step=groups_per_step, updates=updates)
    dues = Counter([*ready, *running])
    least = needed(dues, version=updates, groups_per_step=groups_per_step, updates=updates)
    if allowed:
        assert min(map(len, allowed)) == least
        assert tuple(sorted(ready)[:least]) in allowed


@pytest.mark.parametrize("groups_per_step", [1, 2, 3])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_many_groups_without_an_age_never_pass_one_that_is_due(max_staleness: int, groups_per_step: int) -> None:
    """More of them are ready than a batch has places, while an old group still runs: they wait for it, and then it
    goes with all but one of a batch's places."""
    admission = Admission(slots=(max_staleness + 2) * groups_per_step + 2, max_staleness=max_staleness)
    clock = PolicyClock()
    batches = Batches(admission=admission, clock=clock, groups_per_step=groups_per_step)
    old = admission.admit_nowait()
    assert old == 0
    admission.birth(old, 0)
    clock.committed = max_staleness  # it is due now
    for _ in range(groups_per_step + 1):
        group = admission.admit_nowait()
        assert group is not None
        batches.put(Group(index=group, row=None, members_G=[], seconds=0.0))
    assert batches.take_nowait(groups_per_step) is None
    batches.put(Group(index=old, row=None, members_G=[], seconds=0.0))
    batch = batches.take_nowait(groups_per_step)
    assert batch is not None
    assert sorted(group.index for group in batch) == list(range(groups_per_step))
    assert batches.ready == 2
