"""Which trajectories of a step or an evaluation are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from asyncrl.errors import ConfigError, require_count
from asyncrl.types import Group, Trajectory

__all__ = ["KeptMember", "KeptRollouts", "kept_members"]

_Words: TypeAlias = Literal["extremes", "all", "none"]
_LEAST_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRollouts:
    """What is kept of the trajectories of each step and evaluation, in the folder ``rollouts`` of a run directory."""

    rollouts: _Words | int = "extremes"
    """``extremes``: the best and the worst member of each group. A number: so many trajectories, half of them the best
    and half the worst. ``all``, ``none``."""
    rollout_tokens: bool = False
    """Keep the ids of all tokens too, and the log-probabilities of those that were sampled."""
    rollout_bytes: int = 4 * 2**20
    """Bound on the bytes of a step. A thousand steps have at most 4 GB by default."""

    def __post_init__(self) -> None:
        words = get_args(_Words)
        if isinstance(self.rollouts, int):
            require_count("run.rollouts", self.rollouts, least=1)
        elif self.rollouts not in words:
            allowed = f"one of {', '.join(map(repr, words))}, or a number of trajectories"
            raise ConfigError.for_value("run.rollouts", self.rollouts, allowed)
        require_count("run.rollout_bytes", self.rollout_bytes, least=_LEAST_BYTES)


class KeptMember(NamedTuple):
    """A trajectory that is kept, and whether it is the best or the worst of its group."""

    traj: Trajectory
    group: Group
    best: bool
    worst: bool


def kept_members(groups: Sequence[Group], keep: _Words | int) -> list[KeptMember]:
    """The trajectories to keep, in the order of their groups.

    Members without a reward, because they failed, are worse than all others. Of equal ones the first is the best and
    the last the worst. A number keeps the best, the worst, the second best and so on, whatever their groups; of equal
    ones those of many groups rather than many of one.
    """
    found: list[KeptMember] = []
    for group in groups if keep != "none" else ():
        if not group.members_G:
            continue
        best = max(group.members_G, key=lambda traj: (_merit(traj), -traj.member))
        worst = min(group.members_G, key=lambda traj: (_merit(traj), -traj.member))
        found += [
            KeptMember(traj, group, best=traj is best, worst=traj is worst)
            for traj in group.members_G
            if keep != "extremes" or traj is best or traj is worst
        ]
    if isinstance(keep, str) or keep >= len(found):
        return found
    ranked = sorted(range(len(found)), key=lambda place: _rank(found[place]))
    lowest = keep // 2
    return [found[place] for place in sorted(ranked[:lowest] + ranked[len(found) - (keep - lowest) :])]


def _merit(traj: Trajectory) -> float:
    return -math.inf if traj.reward is None else traj.reward


def _rank(kept: KeptMember) -> tuple[float, int, int]:
    return _merit(kept.traj), kept.traj.member, kept.traj.group
