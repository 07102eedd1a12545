"""Where a group is: all that its tasks need to go on from there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.types import Trajectory

__all__ = ["GroupProgress"]


@dataclass(slots=True, kw_only=True)
class GroupProgress:
    """The state of a group's run, changed only by it. Give it to ``run_group`` to look at it, or to go on from it.

    Example: of four members, 0 left with an earlier part, 1 is done, 2 was cut off in the middle of a conversation,
    and 3 has not begun::

        GroupProgress(left={0}, ended=[first], active={2: second})
    """

    active: dict[int, Trajectory] = field(default_factory=dict)
    """Member -> its trajectory, under way."""
    ended: list[Trajectory] = field(default_factory=list)
    """In the order of ending; those of an earlier part are gone."""
    left: set[int] = field(default_factory=set)
    """Members that are neither: in an earlier part, or discarded."""
    attempts: Counter[int] = field(default_factory=Counter)
    """Member -> its attempts so far, those of earlier starts of the group included."""
    retries: Counter[int] = field(default_factory=Counter)
    """Member -> its further attempts in this start of the group."""
    rerolls: int = 0
    errors: list[BaseException] = field(default_factory=list)
    """Of members that failed."""
    rewarded: int = 0
    """Members that have their reward."""
    at_quorum: dict[int, int] | None = None
    """Member -> tokens that it had generated when enough members were done; None until then."""
    passed: bool = False
    """The deadline has passed."""
    parted: bool = False
    """A part has left: what is missing now is missing, and the group cannot start afresh."""
    lost: BaseException | None = None
    """Why the group cannot be complete."""
    seconds: float = 0.0
    """Spent before this process."""
    started: float = 0.0
    """Loop time at which this process began it."""

    @property
    def has_tokens(self) -> bool:
        """True if a member has sampled something."""
        return bool(self.ended) or any(traj.generated_tokens for traj in self.active.values())

    @property
    def over(self) -> set[int]:
        """Members that need not run; the others do, from the start or on from where they are."""
        return self.left.union(traj.member for traj in self.ended)

    def lose(self, members: set[int]) -> None:
        """A part with these members has left, which it does when the deadline passes; they will not be seen again."""
        self.left |= members
        self.passed = self.parted = True
        self.ended = [traj for traj in self.ended if traj.member not in members]
        for member in members:
            self.active.pop(member, None)

    def reset(self) -> None:
        """The group starts afresh: nothing of it is left but the number of attempts."""
        self.active, self.ended, self.left, self.errors = {}, [], set(), []
        self.retries, self.lost = Counter(), None
        self.rewarded, self.at_quorum, self.passed, self.parted = 0, None, False, False

    def copied(self, now: float) -> GroupProgress:
        """As it is at loop time ``now``. The trajectories are the same ones."""
        return GroupProgress(
            active=dict(self.active),
            ended=list(self.ended),
            left=set(self.left),
            attempts=Counter(self.attempts),
            retries=Counter(self.retries),
            rerolls=self.rerolls,
            errors=list(self.errors),
            rewarded=self.rewarded,
            at_quorum=None if self.at_quorum is None else dict(self.at_quorum),
            passed=self.passed,
            parted=self.parted,
            lost=self.lost,
            seconds=self.seconds + now - self.started,
        )
