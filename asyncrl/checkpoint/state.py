"""What a run is in the middle of, as a value: which step comes next, and which groups are outstanding and how far.

Token data apart, this is all that a stopped run needs to go on. The newest saved value and the journal of the steps
after it give the state at the last commit; ``RunState.apply`` is the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from asyncrl.checkpoint.journal import JournalEntry
from asyncrl.errors import CheckpointError
from asyncrl.rollout.progress import GroupProgress
from asyncrl.scheduling.ledger import LedgerTotals
from asyncrl.types import Group

__all__ = ["GroupState", "RunState"]


@dataclass(slots=True, kw_only=True)
class GroupState:
    """An outstanding group. One that nothing is known of but its index begins from the start."""

    index: int
    due: int | None = None
    """The last version that may be committed when it is trained; None before its birth."""
    taken: set[int] = field(default_factory=set)
    """Members that committed steps have consumed."""
    parts: list[Group] = field(default_factory=list)
    """Finished, and in no committed step."""
    progress: GroupProgress | None = None
    """Where the unfinished members are; None if all are finished, or none has begun."""

    @property
    def is_begun(self) -> bool:
        """True if something of it is there to be trained: then its age counts."""
        return bool(self.parts) or (self.progress is not None and self.progress.has_tokens)

    @property
    def is_finished(self) -> bool:
        """True if no member has to go on."""
        return any(part.final for part in self.parts)

    def lose(self, members: set[int]) -> None:
        """A committed step has consumed these members."""
        self.taken |= members
        kept = [[traj for traj in part.members_G if traj.member not in members] for part in self.parts]
        self.parts = [replace(part, members_G=rest) for part, rest in zip(self.parts, kept, strict=True) if rest]
        if not self.is_finished:
            self.progress = self.progress or GroupProgress()
            self.progress.lose(members)


@dataclass(slots=True, kw_only=True)
class RunState:
    """A run after step ``n``. ``groups`` are the outstanding ones of the ``admitted`` so far."""

    n: int = 0
    version: int = 0
    """Committed."""
    admitted: int = 0
    dropped: int = 0
    """Groups of them that were given up."""
    totals: LedgerTotals = field(default_factory=LedgerTotals)
    groups: dict[int, GroupState] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    """What the metrics have summed up since step ``n``."""
    rollout_keys: tuple[str, ...] = ()
    """Metrics that environments have reported so far."""

    def apply(self, entry: JournalEntry) -> None:
        """Step ``entry.n``, the one after ``n``, was committed."""
        if entry.n != self.n + 1 or entry.version != self.version:
            raise CheckpointError(
                f"the journal goes on with step {entry.n} at version {entry.version}, but the saved state is after "
                f"step {self.n} at version {self.version}"
            )
        self.n, self.version = entry.n, entry.version_after
        self.sums = {}
        for group in range(self.admitted, entry.admitted):
            self.groups[group] = GroupState(index=group)
        self.admitted = max(self.admitted, entry.admitted)
        for consumed in entry.consumed:
            if consumed.final:
                del self.groups[consumed.group]
            else:
                self.groups[consumed.group].lose(set(consumed.members))
            self.totals.consumed += consumed.final
        self.totals.trained_members += entry.trained_members
        self.totals.dropped_members.update(entry.dropped_members)
        for group, reason in entry.dropped:
            if self.groups.pop(group, None) is not None:  # else it was gone when the state was saved
                self.dropped += 1
                self.totals.dropped[reason] += 1
        self.totals.admitted = self.admitted
