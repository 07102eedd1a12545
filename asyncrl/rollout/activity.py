"""What every member is waiting for at this moment, for whoever wants to know why nothing happens.

Written by the members' tasks before each await, and read only when something is slow. Nothing depends on it, and none
of it belongs to the state of a trajectory.
"""

from __future__ import annotations

import heapq
from typing import Literal, NamedTuple, TypeAlias

from asyncrl.types import Trajectory

__all__ = ["Activities", "Activity", "Doing"]

Doing: TypeAlias = Literal["reset", "queue", "sampling", "reply", "reward", "close"]


class Activity(NamedTuple):
    """One member's: what it does, and the loop time since when."""

    traj: Trajectory
    doing: str
    since: float

    @property
    def words(self) -> str:
        """For a person: which tool, which call of the environment."""
        if self.doing == "reply":
            names = ", ".join(call.name or "?" for call in self.traj.tool_calls)
            return f"tool {names}" if names else "environment's on_turn"
        if self.doing in ("reset", "reward", "close"):
            return f"environment's {self.doing}"
        return "a place among the sampling requests" if self.doing == "queue" else "a sampling request"


class Activities(dict[str, tuple[Trajectory, Doing, float]]):
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
