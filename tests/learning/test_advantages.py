from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.learning.advantages import (
    Advantage,
    Batchwise,
    GroupCentered,
    LeaveOneOut,
    MaxRL,
    ReinforcePlusPlus,
    group_by_group,
    ignores_groups,
)

REWARD = st.floats(-10, 10, allow_subnormal=False)
REWARDS = st.lists(st.lists(st.none() | REWARD, min_size=1, max_size=5), min_size=1, max_size=5)


def _plain(group: list[float | None]) -> list[float]:
    return [reward for reward in group if reward is not None]


def test_rewards_are_centred_in_their_group() -> None:
    """The documented example."""
    assert GroupCentered()([[1, 0], [1, 1]], min_members=1) == [[0.5, -0.5], [0, 0]]


def test_an_excluded_member_is_in_no_baseline() -> None:
    """None has the advantage 0 and does not move the others: the mean is over who is there."""
    assert GroupCentered()([[1.0, None, 0.0], [3.0, 1.0]], min_members=2) == [[0.5, 0.0, -0.5], [1.0, -1.0]]


def test_a_group_below_min_members_is_centred_on_the_batch() -> None:
    """One reward of a group that needs two is compared with all four of the batch."""
    assert GroupCentered()([[4.0, None], [0.0, 1.0, 3.0]], min_members=2)[0] == [2.0, 0.0]


def test_a_batch_without_rewards_has_no_advantages() -> None:
    """Every member excluded: zeros, in the shape of the batch."""
    kinds: list[Advantage] = [
        GroupCentered(standardize=True),
        GroupCentered(standardize="batch"),
        Batchwise(),
        LeaveOneOut(),
        MaxRL(),
        ReinforcePlusPlus(),
        ReinforcePlusPlus(baseline="group"),
    ]
    for advantage in kinds:
        assert advantage([[None, None], [None]], min_members=1) == [[0.0, 0.0], [0.0]]


def test_standardized_by_group() -> None:
    """Each group is divided by its own population standard deviation."""
    assert GroupCentered(standardize=True)([[4, 0], [1, 0]], min_members=2) == [[1, -1], [1, -1]]


def test_standardized_by_batch() -> None:
    """All groups are divided by the standard deviation of all centred rewards."""
    advantages = GroupCentered(standardize="batch")([[4, 0], [1, 0]], min_members=2)
    scale = np.std([2, -2, 0.5, -0.5])
    np.testing.assert_allclose(advantages, np.array([[2, -2], [0.5, -0.5]]) / scale)


def test_a_single_reward_is_not_standardized_by_batch() -> None:
    """A deviation of one number says nothing."""
    assert GroupCentered(standardize="batch").batch_scale([[3.0, None]], [[0.0, 0.0]]) == 1.0


@given(REWARDS, st.integers(1, 5), st.sampled_from([False, True]))
def test_group_centred_equals_brute_force(
    rewards: list[list[float | None]], min_members: int, standardize: bool
) -> None:
    """The same numbers as a direct computation, whatever is excluded."""
    advantages = GroupCentered(standardize=standardize, eps=1e-3)(rewards, min_members=min_members)
    everyone = [reward for group in rewards for reward in _plain(group)]
    for group, group_advantages in zip(rewards, advantages, strict=True):
        baseline = _plain(group) if len(_plain(group)) >= min_members else everyone
        scale = max(float(np.std(baseline)), 1e-3) if standardize and baseline else 1.0
        expected = [0.0 if reward is None else float(reward - np.mean(baseline)) / scale for reward in group]
        np.testing.assert_allclose(group_advantages, expected, atol=1e-9)


@given(REWARDS, st.booleans())
def test_batchwise_equals_brute_force(rewards: list[list[float | None]], standardize: bool) -> None:
    """One mean, and one deviation, for the whole batch."""
    advantages = Batchwise(standardize=standardize, eps=1e-3)(rewards, min_members=5)
    everyone = [reward for group in rewards for reward in _plain(group)]
    scale = max(float(np.std(everyone)), 1e-3) if standardize and everyone else 1.0
    for group, group_advantages in zip(rewards, advantages, strict=True):
        expected = [0.0 if reward is None else float(reward - np.mean(everyone)) / scale for reward in group]
        np.testing.assert_allclose(group_advantages, expected, atol=1e-9)


@given(REWARDS)
def test_early_centring_with_a_late_scale_equals_the_whole_batch(rewards: list[list[float | None]]) -> None:
    """``center`` group by group and ``batch_scale`` at the end are what one call gives."""
    advantage = GroupCentered(standardize="batch")
    centered = [advantage.center(group, baseline=_plain(group)) for group in rewards]
    scale = advantage.batch_scale(rewards, centered)
    at_once = advantage(rewards, min_members=0)
    for group, group_at_once in zip(centered, at_once, strict=True):
        np.testing.assert_allclose(np.array(group) / scale, group_at_once)


def test_a_reward_against_those_of_the_others() -> None:
    """The documented example; a member that is left out is nobody's other; alone there is nothing to compare with."""
    assert LeaveOneOut()([[1, 0, 0], [1, None, 0], [5]], min_members=1) == [[1, -0.5, -0.5], [1, 0, -1], [0]]


@given(st.lists(REWARD, min_size=2, max_size=8))
def test_leave_one_out_equals_brute_force(group: list[float]) -> None:
    """Each reward minus the mean of the others."""
    (advantages,) = LeaveOneOut()([group], min_members=2)
    for index, advantage in enumerate(advantages):
        others = group[:index] + group[index + 1 :]
        assert advantage == pytest.approx(group[index] - np.mean(others), abs=1e-9)


def test_a_reward_as_a_part_of_the_mean() -> None:
    """The documented example; a group that never succeeds has no direction."""
    assert MaxRL()([[1, 0, 0, 0], [0, 0], [1, 1]], min_members=2) == [[3, -1, -1, -1], [0, 0], [0, 0]]
    with pytest.raises(ConfigError, match=r"a reward is -1.*MaxRL"):
        MaxRL()([[1, -1]], min_members=2)


@pytest.mark.parametrize("solved", [1, 3, 7])
def test_max_rl_raises_the_likelihood(solved: int) -> None:
    """The sum over members of advantage times gradient is that of log p, whose factor is 1 / p: solved rows weigh 1."""
    rewards = [1.0] * solved + [0.0] * (8 - solved)
    (advantages,) = MaxRL()([rewards], min_members=2)
    assert sum(advantage for advantage in advantages if advantage > 0) / 8 == pytest.approx(1 - solved / 8)


def test_normalised_over_the_batch() -> None:
    """Mean 0 and deviation 1 of all members that have a reward, whatever was subtracted before."""
    rewards = [[4.0, 0.0, None], [1.0, 0.0], [2.0, 2.0]]
    for baseline in ("batch", "group"):
        advantages = ReinforcePlusPlus(baseline=baseline)(rewards, min_members=2)  # type: ignore[arg-type]
        values = [advantages[group][member] for group, member in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]]
        assert [np.mean(values), np.std(values)] == pytest.approx([0, 1], abs=1e-9)
        assert advantages[0][2] == 0.0
    assert advantages[2] == [0.0, 0.0]


def test_which_groups_can_be_trained_alone_or_divided() -> None:
    """Only what is known to need no more; a subclass may."""

    class Own(LeaveOneOut):
        pass

    class OwnBatchwise(Batchwise):
        pass

    kinds: list[Advantage] = [
        GroupCentered(standardize="batch"),
        LeaveOneOut(),
        MaxRL(),
        Batchwise(),
        ReinforcePlusPlus(),
        ReinforcePlusPlus(baseline="group"),
        Own(),
        OwnBatchwise(),
    ]
    assert [group_by_group(kind) is not None for kind in kinds] == [True] * 3 + [False] * 5
    assert [ignores_groups(kind) for kind in kinds] == [False, False, False, True, True, False, False, False]


@given(REWARD, st.integers(1, 60), st.sampled_from([False, True, "batch"]))
def test_equal_rewards_have_no_advantage_at_all(reward: float, members: int, standardize: bool) -> None:
    """Exactly 0, not a rounding error: such members are not trained."""
    assert GroupCentered(standardize=standardize)([[reward] * members], min_members=1) == [[0.0] * members]


@given(st.lists(REWARD, min_size=2, max_size=8), REWARD)
def test_advantages_ignore_a_constant_and_sum_to_zero(group: list[float], constant: float) -> None:
    """Two properties of a baseline that is the mean."""
    (plain,) = GroupCentered()([group], min_members=1)
    (moved,) = GroupCentered()([[reward + constant for reward in group]], min_members=1)
    np.testing.assert_allclose(moved, plain, atol=1e-9)
    assert sum(plain) == pytest.approx(0, abs=1e-9)


def test_wrong_options_are_refused() -> None:
    """The message names the option."""
    for wrong in ("group", 1):
        with pytest.raises(ConfigError, match=rf"advantage\.standardize is {wrong!r}"):
            GroupCentered(standardize=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"advantage\.baseline is 'rows'"):
        ReinforcePlusPlus(baseline="rows")  # type: ignore[arg-type]
    for kind in (GroupCentered, Batchwise, ReinforcePlusPlus):
        with pytest.raises(ConfigError, match=r"advantage\.eps is 0"):
            kind(eps=0)
