"""Advantages: from the rewards of a batch to one number for each trajectory.

``rewards`` is one list for each group; None marks a member that is left out: it is in no baseline and its advantage
is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from asyncrl.errors import ConfigError

__all__ = ["Advantage", "Batchwise", "GroupCentered", "Rewards"]

Rewards: TypeAlias = Sequence[Sequence[float | None]]


class Advantage(Protocol):
    """Any function of a whole batch's rewards; ``GroupCentered`` and ``Batchwise`` are two."""

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        """One advantage for each member, in the shape of ``rewards``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCentered:
    """Reward minus the mean of the member's own group (GRPO, arXiv 2402.03300).

    A group with fewer than ``min_members`` rewards is centred on the mean of the whole batch.
    Example: rewards [[1, 0], [1, 1]] give [[0.5, -0.5], [0, 0]].
    """

    standardize: bool | Literal["batch"] = False
    """Divide by the group's standard deviation (True), or by that of all centred rewards of the batch ("batch")."""
    eps: float = 1e-8
    """The least that is divided by, for groups whose rewards hardly differ."""

    def __post_init__(self) -> None:
        if not isinstance(self.standardize, bool) and self.standardize != "batch":
            raise ConfigError.for_value("advantage.standardize", self.standardize, "false, true or 'batch'")
        if not self.eps > 0:
            raise ConfigError.for_value("advantage.eps", self.eps, "more than 0")

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        """Centre each group, and divide by the standard deviation that ``standardize`` names."""
        everyone = _present([reward for group in rewards for reward in group])
        centered = [
            self.center(group, baseline=present if len(present := _present(group)) >= min_members else everyone)
            for group in rewards
        ]
        scale = self.batch_scale(rewards, centered)
        return [[advantage / scale for advantage in group] for group in centered]

    def center(self, group: Sequence[float | None], *, baseline: Sequence[float]) -> list[float]:
        """A group's advantages without the factor that only the whole batch knows."""
        if not baseline:
            return [0.0] * len(group)
        mean = _mean(baseline)
        scale = max(_deviation(baseline), self.eps) if self.standardize is True else 1.0
        return [0.0 if reward is None else (reward - mean) / scale for reward in group]

    def batch_scale(self, rewards: Rewards, centered: Sequence[Sequence[float]]) -> float:
        """What all centred advantages of the batch are divided by: 1 unless ``standardize="batch"``."""
        if self.standardize != "batch":
            return 1.0
        values = [
            advantage
            for group, advantages in zip(rewards, centered, strict=True)
            for reward, advantage in zip(group, advantages, strict=True)
            if reward is not None
        ]
        return max(_deviation(values), self.eps) if len(values) > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batchwise:
    """Reward minus the mean of the whole batch; ``standardize`` divides by its standard deviation, at least ``eps``."""

    standardize: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError.for_value("advantage.eps", self.eps, "more than 0")

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        """Centre every group on the mean of all present rewards; ``min_members`` is not needed."""
        everyone = _present([reward for group in rewards for reward in group])
        center = GroupCentered(standardize=self.standardize, eps=self.eps).center
        return [center(group, baseline=everyone) for group in rewards]


def _present(group: Sequence[float | None]) -> list[float]:
    return [reward for reward in group if reward is not None]


def _mean(values: Sequence[float]) -> float:
    # Rounding can put a mean outside of its values, and then a group without signal would have an advantage.
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
