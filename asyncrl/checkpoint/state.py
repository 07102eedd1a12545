"""What a run is in the middle of, as a value: which step comes next, and which groups are outstanding and how far.

Token data apart, this is all that a stopped run needs to go on. The newest saved value and the journal of the steps
after it give the state at the last commit; ``RunState.apply`` is the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.errors import CheckpointError
from asyncrl.learning.base import Update
from asyncrl.rollout.progress import GroupProgress
from asyncrl.scheduling.ledger import LedgerTotals
from asyncrl.scheduling.staleness import places
from asyncrl.types import Group, Trajectory

__all__ = ["Consumed", "GroupState", "JournalEntry", "Renewed", "RunState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """A group, or those ``members`` of it that were in a batch; ``final`` if none of it follows."""

    group: int
    members: tuple[int, ...]
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """An outstanding group that began anew, at that moment: nothing that it had sampled before is left."""

    group: int
    number: int
    """How often it has begun anew, this time included."""
    rerolls: int
    """How often of these because a member failed."""
    attempts: tuple[tuple[int, int], ...]
    """Member and its attempts before this start."""

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Renewed:
        """From its JSON."""
        return cls(**{**value, "attempts": tuple((member, count) for member, count in value["attempts"])})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JournalEntry:
    """What trainer step ``n`` was made from."""

    n: int
    version: int
    """Committed before it."""
    admitted: int
    """Groups admitted by then."""
    consumed: tuple[Consumed, ...]
    dropped: tuple[tuple[int, str], ...] = ()
    """Groups that were given up since the step before, and their ``DropReason``."""
    renewed: tuple[Renewed, ...] = ()
    """The newest new start of each outstanding group that had one, however long ago."""
    trained_members: int = 0
    dropped_members: Mapping[str, int] = field(default_factory=dict)
    """``DropReason`` -> the other members of the batch."""
    failed_attempts: int = 0
    """Of members, since the run began."""
    rerolled: int = 0
    """Fresh starts of groups, since the run began."""
    run: str = ""
    """Which run it is of: directories of the same options are not the same run."""
    loss: str = ""
    """Its name and options, for a reader: a resumed run has the same one."""
    updates: Sequence[Update] = ()
    """What was trained; each whose optimizer step was taken made a version."""

    @property
    def version_after(self) -> int:
        """Committed after it."""
        return self.version + sum(update.settings is not None for update in self.updates)


@dataclass(slots=True, kw_only=True)
class GroupState:
    """An outstanding group. One that nothing is known of but its index begins from the start."""

    index: int
    due: int | None = None
    """The last version that may be committed when its batch starts; None before its birth."""
    taken: set[int] = field(default_factory=set)
    """Members that committed steps have consumed."""
    parts: list[Group] = field(default_factory=list)
    """Finished, and in no committed step."""
    progress: GroupProgress | None = None
    """Where the unfinished members are; None if all are finished, or none has begun."""
    renewed: Renewed | None = None
    """Its newest new start; None if it is in its first one."""

    @property
    def is_begun(self) -> bool:
        """True if something of it is there to be trained: then its age counts."""
        return bool(self.parts) or (self.progress is not None and self.progress.has_tokens)

    @property
    def is_finished(self) -> bool:
        """True if no member has to go on."""
        return any(part.final for part in self.parts)

    @property
    def members(self) -> list[Trajectory]:
        """Those that are here: finished, or under way."""
        going = [] if self.progress is None else [*self.progress.ended, *self.progress.active.values()]
        return [*(traj for part in self.parts for traj in part.members_G), *going]

    @property
    def next_start(self) -> Renewed:
        """Its new start, if it begins anew now."""
        progress = self.progress or GroupProgress()
        number = 1 if self.renewed is None else self.renewed.number + 1
        attempts = tuple(sorted(progress.attempts.items()))
        return Renewed(group=self.index, number=number, rerolls=progress.rerolls, attempts=attempts)

    def begin_anew(self, start: Renewed) -> None:
        """Nothing of it is left but what committed steps have consumed, so that it is not born any more."""
        self.due, self.parts, self.renewed = None, [], start
        self.progress = GroupProgress(rerolls=start.rerolls, attempts=Counter(dict(start.attempts)))
        if self.taken:
            self.progress.remove(self.taken)

    def consume(self, members: set[int]) -> None:
        """Take out these members, which a committed step has consumed."""
        self.taken |= members
        kept = [[traj for traj in part.members_G if traj.member not in members] for part in self.parts]
        self.parts = [replace(part, members_G=rest) for part, rest in zip(self.parts, kept, strict=True) if rest]
        if not self.is_finished:
            self.progress = self.progress or GroupProgress()
            self.progress.remove(members)


@dataclass(slots=True, kw_only=True)
class RunState:
    """A run after step ``n``. ``groups`` are the outstanding ones of the ``admitted`` so far."""

    run: str = ""
    """Which run it is of; see ``JournalEntry``."""
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
    untrained: int = 0
    """Batches in a row, up to step ``n``, that made no version."""

    def apply(self, entry: JournalEntry) -> None:
        """Step ``entry.n``, the one after ``n``, was committed."""
        if entry.n != self.n + 1 or entry.version != self.version:
            raise CheckpointError(
                f"the journal goes on with step {entry.n} at version {entry.version}, but the saved state is after "
                f"step {self.n} at version {self.version}"
            )
        self.untrained = self.untrained + 1 if entry.version_after == self.version else 0
        self.n, self.version = entry.n, entry.version_after
        self.sums = {}
        for group in range(self.admitted, entry.admitted):
            self.groups[group] = GroupState(index=group)
        self.admitted = max(self.admitted, entry.admitted)
        for start in entry.renewed:
            self._renew(start)
        for consumed in entry.consumed:
            if consumed.final:
                del self.groups[consumed.group]
            else:
                self.groups[consumed.group].consume(set(consumed.members))
            self.totals.consumed += consumed.final
        self.totals.trained_members += entry.trained_members
        self.totals.dropped_members.update(entry.dropped_members)
        for group, reason in entry.dropped:
            if self.groups.pop(group, None) is not None:  # else it was gone when the state was saved
                self.dropped += 1
                self.totals.dropped[reason] += 1
        self.totals.admitted = self.admitted
        self.totals.failed_attempts = max(self.totals.failed_attempts, entry.failed_attempts)
        self.totals.rerolled = max(self.totals.rerolled, entry.rerolled)

    def require_versions(self) -> None:
        """Raise ``CheckpointError`` if something was sampled by a version that the run has not made."""
        for group in self.groups.values():
            for traj in group.members:
                found = {span.version for span in traj.spans} | {traj.version, traj.anchor}
                bad = [version for version in found if version is not None and not 0 <= version <= self.version]
                if bad:
                    raise CheckpointError(
                        f"the saved state has tokens of version {bad[0]} in group {group.index}, but the run is at "
                        f"version {self.version}: its files are not of one run"
                    )

    def renew_unsampled(self) -> None:
        """Groups that were born but have nothing left are not born any more.

        Their next first segment is a birth like any other. They keep the number of their attempts.
        """
        for group in self.groups.values():
            if group.due is not None and not group.is_begun:
                group.renewed, group.due = group.next_start, None

    def begin_late_anew(self, *, groups_per_step: int, updates: int = 1) -> list[dict[str, object]]:
        """Let those groups begin anew that cannot all be trained in time; earlier due ones are kept.

        The rule of ``staleness.feasible``: up to each due step no more groups than have ``places``. That holds by
        itself, as the journal has whatever freed the barrier since the snapshot; should it not, the run goes on all the
        same. Returns what there is to say of each group.
        """
        kept = 0
        late: list[dict[str, object]] = []
        born = [(group.due, group) for group in self.groups.values() if group.due is not None]
        for due, group in sorted(born, key=lambda pair: (pair[0], not pair[1].is_finished)):
            if kept < places(due, version=self.version, groups_per_step=groups_per_step, updates=updates):
                kept += 1
                continue
            tokens = sum(traj.generated_tokens for traj in group.members)
            late.append({"group": group.index, "due": due, "version": self.version, "generated_tokens": tokens})
            group.begin_anew(group.next_start)
        return late

    @property
    def unfinished(self) -> list[tuple[GroupProgress, Trajectory]]:
        """Trajectories that are under way, each with the progress of its group."""
        going = [group.progress for group in self.groups.values() if group.progress is not None]
        return [(progress, traj) for progress in going for traj in progress.active.values()]

    def _renew(self, start: Renewed) -> None:
        """The group of ``start`` may be gone, or be in that start already, if the state was saved after it."""
        group = self.groups.get(start.group)
        if group is not None and (group.renewed is None or group.renewed.number < start.number):
            group.begin_anew(start)
