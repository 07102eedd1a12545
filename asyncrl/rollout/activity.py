"""What every member is waiting for at this moment, for whoever wants to know why nothing happens.

Written by the members' tasks before each await, and read only when something is slow. Nothing depends on it, and none
of it belongs to the state of a trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.types import Trajectory

__all__ = ["Activities", "Activity"]


@dataclass(slots=True, kw_only=True, eq=False)
class Activity:
    """One member's."""

    traj: Trajectory
    doing: str
    """``reset``, ``queue``, ``sampling``, ``reply``, ``reward`` or ``close``."""
    since: float
    """Loop time at which that began."""
    server: str = ""
    """Where its last request was answered; the next one goes there too if it can."""

    @property
    def words(self) -> str:
        """For a person: which tool, which call of the environment."""
        if self.doing == "reply":
            names = ", ".join(call.name or "?" for call in self.traj.tool_calls)
            return f"tool {names}" if names else "environment's on_turn"
        if self.doing in ("reset", "reward", "close"):
            return f"environment's {self.doing}"
        return "a place among the sampling requests" if self.doing == "queue" else "a sampling request"


class Activities:
    """Owns the activity of each member that has a slot. ``changed`` is the loop time of the last change."""

    def __init__(self) -> None:
        self.changed = 0.0
        self._members: dict[str, Activity] = {}

    def __len__(self) -> int:
        return len(self._members)

    def begin(self, traj: Trajectory, time: float) -> None:
        """An attempt begins."""
        self._members[traj.id] = Activity(traj=traj, doing="reset", since=time)
        self.changed = time

    def now(self, traj: Trajectory, doing: str, time: float) -> None:
        """``traj`` does this from now on."""
        activity = self._members[traj.id]
        activity.doing = doing
        activity.since = time
        self.changed = time

    def served(self, traj: Trajectory, server: str) -> None:
        """``server`` answered a request of it."""
        self._members[traj.id].server = server

    def end(self, traj: Trajectory, time: float) -> None:
        """The attempt is over."""
        del self._members[traj.id]
        self.changed = time

    @property
    def oldest(self) -> Activity | None:
        """Who has waited longest for one thing; None if nobody runs."""
        members: Iterable[Activity] = self._members.values()
        return min(members, key=lambda activity: activity.since, default=None)
