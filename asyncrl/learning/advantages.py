"""Advantages: from the rewards of a batch to one number for each trajectory.

``rewards`` is one list for each group; None marks a member that is left out: it is in no baseline and its advantage
is 0. A function of one's own, or a subclass of one of these, is asked for the whole batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from asyncrl.errors import ConfigError, require_choice

__all__ = [
    "Advantage",
    "Batchwise",
    "GroupCentered",
    "GroupWise",
    "LeaveOneOut",
    "MaxRL",
    "ReinforcePlusPlus",
    "Rewards",
    "group_by_group",
    "ignores_groups",
]

Rewards: TypeAlias = Sequence[Sequence[float | None]]
_Baseline: TypeAlias = Literal["batch", "group"]


class Advantage(Protocol):
    """Any function of a whole batch's rewards; the classes here are some."""

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        """One advantage for each member, in the shape of ``rewards``."""
        ...


class GroupWise(ABC):
    """Of each group alone, up to one factor: a group can be trained before its batch is complete.

    A group with fewer than ``min_members`` rewards is compared with all of the batch.
    """

    __slots__ = ()

    @abstractmethod
    def center(self, group: Sequence[float | None], *, baseline: Sequence[float]) -> list[float]:
        """A group's advantages without the factor that only the whole batch knows."""

    def batch_scale(self, rewards: Rewards, centered: Sequence[Sequence[float]]) -> float:
        """What all centred advantages of the batch are divided by."""
        return 1.0

    def centered(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        """``center`` of each group, with the baseline that is its own."""
        everyone = _present([reward for group in rewards for reward in group])
        return [
            self.center(group, baseline=present if len(present := _present(group)) >= min_members else everyone)
            for group in rewards
        ]

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        """Centre each group, and divide by what the batch says."""
        centered = self.centered(rewards, min_members=min_members)
        scale = self.batch_scale(rewards, centered)
        return [[advantage / scale for advantage in group] for group in centered]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCentered(GroupWise):
    """Reward minus the mean of the member's own group (GRPO, arXiv 2402.03300; undivided as in 2503.20783).

    Example: rewards [[1, 0], [1, 1]] give [[0.5, -0.5], [0, 0]].
    """

    standardize: bool | Literal["batch"] = False
    """Divide by the group's standard deviation (True), or by that of all centred rewards of the batch ("batch")."""
    eps: float = 1e-8
    """The least that is divided by, for groups whose rewards hardly differ."""

    def __post_init__(self) -> None:
        if not isinstance(self.standardize, bool) and self.standardize != "batch":
            raise ConfigError.for_value("advantage.standardize", self.standardize, "false, true or 'batch'")
        _require_eps(self.eps)

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
        values = _present_values(rewards, centered)
        return max(_deviation(values), self.eps) if len(values) > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut(GroupWise):
    """Reward minus the mean of the group's other members (RLOO, arXiv 2402.14740): a baseline without own reward.

    With n members it is n / (n - 1) times the difference to the mean of all; alone, it is 0.
    Example: rewards [[1, 0, 0]] give [[1, -0.5, -0.5]].
    """

    def center(self, group: Sequence[float | None], *, baseline: Sequence[float]) -> list[float]:
        """Each reward against those of the others."""
        n = len(baseline)
        if n < 2:
            return [0.0] * len(group)
        mean = _mean(baseline)
        return [0.0 if reward is None else (reward - mean) * n / (n - 1) for reward in group]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRL(GroupWise):
    """(reward - mean) / mean of the group, 0 where all are 0 (MaxRL, arXiv 2602.02710).

    For rewards of 0 and 1: the gradient of the mean is that of log p and not of p, so that rows that are rarely solved
    count more. Rewards must not be negative. Example: rewards [[1, 0, 0, 0]] give [[3, -1, -1, -1]].
    """

    def center(self, group: Sequence[float | None], *, baseline: Sequence[float]) -> list[float]:
        """Each reward as a part of the mean."""
        if baseline and min(baseline) < 0:
            raise ConfigError.for_value("a reward", min(baseline), "at least 0 with advantage MaxRL")
        mean = _mean(baseline) if baseline else 0.0
        return [0.0 if reward is None or mean == 0 else (reward - mean) / mean for reward in group]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batchwise:
    """Reward minus the mean of the whole batch; ``standardize`` divides by its standard deviation, at least ``eps``."""

    standardize: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _require_eps(self.eps)

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        """Centre every group on the mean of all present rewards; ``min_members`` is not needed."""
        everyone = _present([reward for group in rewards for reward in group])
        center = GroupCentered(standardize=self.standardize, eps=self.eps).center
        return [center(group, baseline=everyone) for group in rewards]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlus:
    """Normalised over the batch to mean 0 and deviation 1 (REINFORCE++, arXiv 2501.03262).

    With baseline "group" the mean of the own group is subtracted before (REINFORCE++-baseline). The paper's penalty on
    the distance to a reference is ``KLPenalty(kind="k1", where="reward")``.
    """

    baseline: _Baseline = "batch"
    """What is subtracted first: "batch", the mean of all; "group", that of the own group."""
    eps: float = 1e-8
    """The least that is divided by."""

    def __post_init__(self) -> None:
        require_choice("advantage.baseline", self.baseline, _Baseline)
        _require_eps(self.eps)

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        """Centre, then divide all by one deviation."""
        if self.baseline == "batch":
            return Batchwise(standardize=True, eps=self.eps)(rewards, min_members=min_members)
        centered = GroupCentered()(rewards, min_members=min_members)
        values = _present_values(rewards, centered)
        if not values:
            return centered
        # The mean is 0 but for members of small groups, and a group without variance stays without an advantage.
        scale = max(_deviation(values), self.eps)
        return [[advantage / scale for advantage in group] for group in centered]


def group_by_group(advantage: Advantage) -> GroupWise | None:
    """The advantage if its groups can be trained one by one.

    Not a subclass, and not a function of one's own: what they do may need the whole batch.
    """
    if isinstance(advantage, GroupWise) and type(advantage) in (GroupCentered, LeaveOneOut, MaxRL):
        return advantage
    return None


def ignores_groups(advantage: Advantage) -> bool:
    """True if a group may be divided between batches, for it makes no difference; not of a subclass."""
    return type(advantage) is Batchwise or (
        type(advantage) is ReinforcePlusPlus and getattr(advantage, "baseline", None) == "batch"
    )


def _require_eps(eps: float) -> None:
    if not eps > 0:
        raise ConfigError.for_value("advantage.eps", eps, "more than 0")


def _present(group: Sequence[float | None]) -> list[float]:
    return [reward for reward in group if reward is not None]


def _present_values(rewards: Rewards, values: Sequence[Sequence[float]]) -> list[float]:
    """Those of members that have a reward."""
    return [
        value
        for group, group_values in zip(rewards, values, strict=True)
        for reward, value in zip(group, group_values, strict=True)
        if reward is not None
    ]


def _mean(values: Sequence[float]) -> float:
    # Rounding can put a mean outside of its values, and then a group without signal would have an advantage.
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
