"""What an evaluation says of its trajectories: pass@k, and how sure the mean is."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.training.measures import clustered_error, measures, pass_at
from asyncrl.types import Group, Trajectory


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_all_subsets(passes: list[bool], data: st.DataObject) -> None:
    """Of every ``k`` members, those in which one has passed."""
    k = data.draw(st.integers(1, len(passes)))
    subsets = list(itertools.combinations(passes, k))
    assert pass_at(k, len(passes), sum(passes)) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_the_standard_error_counts_rows() -> None:
    """Equal members tell no more than one; members of a row that differ as much as rows do tell more."""
    alone = clustered_error([[0.0], [1.0], [1.0], [0.0]])
    assert alone == pytest.approx(statistics.stdev([0, 1, 1, 0]) / 2)
    assert clustered_error([[0.0] * 8, [1.0] * 8, [1.0] * 8, [0.0] * 8]) == pytest.approx(alone)
    assert clustered_error([[0.0, 1.0]] * 4) == 0.0
    assert math.isnan(clustered_error([[0.0, 1.0]]))


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_rows_of_one_member_have_the_usual_standard_error(rewards: list[float]) -> None:
    """Standard deviation over the root of their number."""
    found = clustered_error([[reward] for reward in rewards])
    assert found == pytest.approx(statistics.stdev(rewards) / math.sqrt(len(rewards)), abs=1e-9)


def _group(index: int, rewards: list[float | None]) -> Group:
    members = [
        Trajectory(id=f"{index}.{m}", group=index, member=m, row=0, seed=0, reward=reward, metrics={"won": 1.0})
        for m, reward in enumerate(rewards)
    ]
    return Group(index=index, row=0, members_G=members, seconds=1.0)


def test_measures_of_an_evaluation() -> None:
    """A row of which too few members have a reward is left out of pass@k for larger k; NaN if all are."""
    found = measures([_group(0, [1.0, 0.0, 0.2]), _group(1, [1.0, None, None])], group_size=3, pass_reward=1.0)
    assert found["reward_mean"] == pytest.approx(0.55)
    assert found["reward_ci95"] == pytest.approx(1.96 * found["reward_standard_error"])
    assert found["pass@1"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["pass@2"] == pytest.approx(2 / 3)
    assert found["pass@3"] == 1.0
    assert found["rollout/won_mean"] == 1.0
    assert [key for key in measures([_group(0, [1.0])], group_size=8, pass_reward=1.0) if "@" in key] == [
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@8",
    ]
