"""Where groups and their members are: all that their tasks need to go on, and what each is waiting for.

``GroupProgress`` is saved and read back. ``Activities`` are for whoever wants to know why nothing happens: the members'
tasks write them before each await, nothing depends on them, and they belong to no trajectory's state.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from asyncrl.types import Trajectory

__all__ = ["Activities", "Activity", "GroupProgress"]


@dataclass(slots=True, kw_only=True)
class GroupProgress:
    """The state of a group's run, changed only by it. Give it to ``run_group`` to look at it, or to go on from it.

    Example: of four members, 0 was handed over with an earlier part, 1 is done, 2 was cut off in the middle of a
    conversation, and 3 has not begun::

        GroupProgress(removed={0}, ended=[first], active={2: second})
    """

    active: dict[int, Trajectory] = field(default_factory=dict)
    """Member -> its trajectory, under way."""
    ended: list[Trajectory] = field(default_factory=list)
    """In the order of ending; those of an earlier part are gone."""
    removed: set[int] = field(default_factory=set)
    """Members that are neither: handed over with an earlier part, or discarded."""
    attempts: Counter[int] = field(default_factory=Counter)
    """Member -> its attempts so far, those of earlier starts of the group included."""
    retries: Counter[int] = field(default_factory=Counter)
    """Member -> its further attempts in this start of the group."""
    rerolls: int = 0
    at_quorum: dict[int, int] | None = None
    """Member -> tokens that it had generated when enough members were done; None until then."""
    deadline_passed: bool = False
    part_handed_over: bool = False
    """Some members are with the trainer already: the group goes on without those that fail, and cannot start afresh."""
    failure: BaseException | None = None
    """The error of a member that failed for good, so that the group cannot be complete."""
    seconds: float = 0.0
    """Spent before this process."""
    started: float = 0.0
    """Loop time at which this process began it."""

    @property
    def has_tokens(self) -> bool:
        """True if a member has sampled something."""
        return bool(self.ended) or any(traj.generated_tokens for traj in self.active.values())

    @property
    def done(self) -> set[int]:
        """Members that need not run; the others do, from the start or on from where they are."""
        return self.removed.union(traj.member for traj in self.ended)

    @property
    def rewarded(self) -> int:
        """Members among those that ended that have their reward."""
        return sum(traj.reward is not None for traj in self.ended)

    def remove(self, members: set[int]) -> None:
        """These members were handed over with a part, as happens when the deadline passes; they will not be seen
        again.
        """
        self.removed |= members
        self.deadline_passed = self.part_handed_over = True
        self.ended = [traj for traj in self.ended if traj.member not in members]
        for member in members:
            self.active.pop(member, None)

    def reset(self) -> None:
        """The group starts afresh: nothing of it is left but the number of attempts."""
        self.active, self.ended, self.removed = {}, [], set()
        self.retries, self.failure = Counter(), None
        self.at_quorum, self.deadline_passed, self.part_handed_over = None, False, False

    def copied(self, now: float) -> GroupProgress:
        """As it is at loop time ``now``. The trajectories are the same ones."""
        return replace(
            self,
            active=dict(self.active),
            ended=list(self.ended),
            removed=set(self.removed),
            attempts=Counter(self.attempts),
            retries=Counter(self.retries),
            at_quorum=None if self.at_quorum is None else dict(self.at_quorum),
            seconds=self.seconds + now - self.started,
            started=0.0,
        )


class Activity(NamedTuple):
    """What a member does (``queue``, ``sampling``, or a method of its environment), and since which loop time."""

    traj: Trajectory
    doing: str
    since: float

    @property
    def words(self) -> str:
        """What it waits for, as text: which tool, which call of the environment, or which part of sampling."""
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
        """Loop time at which a member that still runs last began to do something else."""
        return max((since for _, _, since in self.values()), default=0.0)

    def oldest(self, most: int) -> list[Activity]:
        """The ``most`` members that have waited longest for one thing."""
        return [Activity(*each) for each in heapq.nsmallest(most, self.values(), key=lambda activity: activity[2])]
