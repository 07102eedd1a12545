from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.learning.advantages import Batchwise, GroupCentered

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
    for advantage in (GroupCentered(standardize=True), GroupCentered(standardize="batch"), Batchwise()):
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
    for kind in (GroupCentered, Batchwise):
        with pytest.raises(ConfigError, match=r"advantage\.eps is 0"):
            kind(eps=0)
