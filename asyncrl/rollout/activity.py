"""What every member is waiting for at this moment, for whoever wants to know why nothing happens.

Written by the members' tasks before each await, and read only when something is slow. Nothing depends on it, and none
of it belongs to the state of a trajectory.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from asyncrl.types import Trajectory

__all__ = ["Activities", "Activity"]


class Activity(NamedTuple):
    """One member's: what it does (``queue``, ``sampling``, or a method of its environment), since which loop time."""

    traj: Trajectory
    doing: str
    since: float

    @property
    def words(self) -> str:
        """For a person: which tool, which call of the environment."""
        if self.doing == "on_turn" and self.traj.tool_calls:
            return f"tool {', '.join(call.name or '?' for call in self.traj.tool_calls)}"
        plain = {"queue": "a place among the sampling requests", "sampling": "a sampling request"}
        return plain.get(self.doing) or f"environment's {self.doing}"


class Activities(dict[str, tuple[Trajectory, str, float]]):
    """Trajectory id -> itself, what it does, since when; of each member that has a slot.

    A plain dict of plain tuples, because a member writes it several times in each turn.
    """

    @property
    def changed(self) -> float:
        """When somebody began to do something else, as far as they still run."""
        return max((since for _, _, since in self.values()), default=0.0)

    def oldest(self, most: int) -> list[Activity]:
        """The ``most`` who have waited longest for one thing."""
        return [Activity(*each) for each in heapq.nsmallest(most, self.values(), key=lambda activity: activity[2])]
