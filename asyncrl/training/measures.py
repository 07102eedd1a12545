"""What an evaluation says: means, how sure they are, and pass@k. Pure functions of the finished groups.

Members of a row are not independent of each other: a hard row is hard for all of them. The standard error counts rows
and not trajectories (clustered standard errors: Miller, "Adding error bars to evals", arXiv 2411.00640)::

    SE = sqrt(R / (R - 1) * sum over rows of (sum over its members of (reward - mean))**2) / N

for N rewards of R rows; ``mean +- 1.96 SE`` holds the true mean in 95 of 100 evaluations.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from asyncrl.plain import metric, numbers
from asyncrl.types import Group

__all__ = ["clustered_error", "measures", "pass_at"]

_NORMAL_95 = 1.96


def measures(groups: Sequence[Group], *, group_size: int, pass_reward: float) -> dict[str, float]:
    """The metrics of an evaluation of ``groups``, of which there is at least one with a reward.

    A member passes if its reward is at least ``pass_reward``.
    """
    members = [member for group in groups for member in group.members_G]
    rewards_R = [[member.reward for member in group.members_G if member.reward is not None] for group in groups]
    rewards = [reward for row in rewards_R for reward in row]
    error = clustered_error(rewards_R)
    sums: Counter[str] = Counter()
    for member in members:
        sums.update(numbers(member.metrics))
    return {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_standard_error": error,
        "reward_ci95": _NORMAL_95 * error,
        **{f"pass@{k}": _pass_mean(rewards_R, k, pass_reward) for k in _ks(group_size)},
        "trajectories": float(len(members)),
        "generated_tokens_mean": statistics.fmean(member.generated_tokens for member in members),
        "truncated_frac": statistics.fmean(member.truncated is not None for member in members),
        **{f"rollout/{key}_mean": metric(value / len(members)) for key, value in sorted(sums.items())},
    }


def clustered_error(rewards_R: Sequence[Sequence[float]]) -> float:
    """The standard error of the mean of all rewards, which are given row by row; NaN for fewer than two rows."""
    rows = [row for row in rewards_R if row]
    rewards = [reward for row in rows for reward in row]
    if len(rows) < 2:
        return math.nan
    mean = statistics.fmean(rewards)
    squares = math.fsum(math.fsum(reward - mean for reward in row) ** 2 for row in rows)
    return math.sqrt(len(rows) / (len(rows) - 1) * squares) / len(rewards)


def pass_at(k: int, members: int, passed: int) -> float:
    """The chance that of ``k`` of the ``members``, drawn without replacement, at least one ``passed``.

    The estimator without bias of Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374.
    """
    return 1.0 - math.comb(members - passed, k) / math.comb(members, k)


def _pass_mean(rewards_R: Iterable[Sequence[float]], k: int, pass_reward: float) -> float:
    """Over the rows that have ``k`` members with a reward; NaN without any."""
    found = [pass_at(k, len(row), sum(reward >= pass_reward for reward in row)) for row in rewards_R if len(row) >= k]
    return statistics.fmean(found) if found else math.nan


def _ks(group_size: int) -> list[int]:
    """1, the powers of two below the group's size, and that."""
    return sorted({*(2**power for power in range((group_size - 1).bit_length())), group_size})
