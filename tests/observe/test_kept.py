"""Which trajectories are kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.observe.kept import KeptRollouts, kept_members
from asyncrl.types import DropReason, Group, Trajectory

REWARDS = st.none() | st.sampled_from([0.0, 1.0]) | st.floats(-1e12, 1e12)


def _group(index: int, rewards: Sequence[float | None]) -> Group:
    members = [
        Trajectory(
            id=f"{index}-{member}",
            group=index,
            member=member,
            row=None,
            seed=0,
            reward=reward,
            dropped=DropReason.FAILED if reward is None else None,
        )
        for member, reward in enumerate(rewards)
    ]
    return Group(index=index, row=None, members_G=members, seconds=1.0)


def _kept(rewards: Sequence[Sequence[float | None]], keep: object) -> list[tuple[int, int]]:
    groups = [_group(index, group) for index, group in enumerate(rewards)]
    return [(kept.traj.group, kept.traj.member) for kept in kept_members(groups, keep)]  # type: ignore[arg-type]


def test_the_best_and_the_worst_of_each_group_are_kept() -> None:
    """Of equal ones the first is the best and the last the worst; who failed is worse than any reward."""
    assert _kept([[0.5, 2.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, None, -5.0]], "extremes") == [
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 2),
        (2, 0),
        (2, 1),
    ]


def test_a_number_keeps_as_many_of_both_ends() -> None:
    """Of equal rewards from many groups, not many of the first one."""
    rewards = [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]]
    kept = _kept(rewards, 4)
    assert sorted(rewards[group][member] for group, member in kept) == [0.0, 0.0, 1.0, 1.0]
    assert {group for group, _ in kept} == {0, 1}
    assert len(_kept(rewards, 1)) == 1
    assert _kept(rewards, 100) == _kept(rewards, "all")


@given(rewards=st.lists(st.lists(REWARDS, max_size=5), max_size=5), number=st.integers(1, 30))
def test_what_is_kept_is_in_order_and_no_more_than_wanted(rewards: list[list[float | None]], number: int) -> None:
    """Whatever the rewards: nobody twice, and the marks agree with what ``extremes`` keeps."""
    groups = [_group(index, group) for index, group in enumerate(rewards)]
    everything = kept_members(groups, "all")
    assert len(everything) == sum(map(len, rewards))
    marked = [kept for kept in everything if kept.best or kept.worst]
    assert [kept.traj for kept in kept_members(groups, "extremes")] == [kept.traj for kept in marked]
    some = [kept.traj.id for kept in kept_members(groups, number)]
    assert len(some) == len(set(some)) == min(number, len(everything))
    assert some == [kept.traj.id for kept in everything if kept.traj.id in set(some)]
    assert kept_members(groups, "none") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rollouts": "best"}, "run.rollouts is 'best'"),
        ({"rollouts": 0}, "run.rollouts is 0"),
        ({"rollouts": True}, "run.rollouts is True"),
        ({"rollouts": None}, "run.rollouts is None"),
        ({"rollout_bytes": 10}, "run.rollout_bytes is 10"),
    ],
)
def test_a_wrong_option_is_refused_with_its_key(options: dict[str, object], said: str) -> None:
    """And with what is allowed."""
    with pytest.raises(ConfigError, match=said):
        KeptRollouts(**options)  # type: ignore[arg-type]
