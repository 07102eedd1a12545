"""Between the owners of a run's state and a ``RunState``.

``RunRecord.state`` makes the value while the run goes on. On the event loop it only collects references, and copies the
lists of trajectories that are under way: what it costs grows with the number of spans and messages, not of tokens.
``restore`` gives it back to new owners.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import anyio

from asyncrl.checkpoint.state import Consumed, GroupState, JournalEntry, RunState
from asyncrl.checkpoint.trajectories import frozen
from asyncrl.events import GroupConsumed
from asyncrl.learning.base import Update
from asyncrl.learning.losses import Loss
from asyncrl.observe.metrics import MetricsRecorder
from asyncrl.observe.untrained import Untrained
from asyncrl.rollout.progress import GroupProgress
from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.batches import Batches
from asyncrl.scheduling.ledger import Ledger, LedgerTotals
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.types import Group

__all__ = ["RunRecord", "restored_ledger"]


@dataclass(slots=True)
class RunRecord:
    """Owns what is known of outstanding groups beside what their owners know.

    Of each step it is told in the order ``begin``, ``entry``, ``commit``.
    """

    admission: Admission
    batches: Batches
    ledger: Ledger
    recorder: MetricsRecorder
    clock: PolicyClock
    untrained: Untrained
    n: int = 0
    """Steps that were committed."""
    rollout_keys: dict[str, float] = field(default_factory=dict)
    """Metrics that environments have reported so far -> 0.0."""
    groups: dict[int, GroupState] = field(default_factory=dict)
    """Outstanding groups that have begun, without what other owners know: their due step and finished parts."""
    step_groups: Sequence[Group] = ()
    """Groups of the step under way."""
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """Groups that were given up since the last commit, and why."""
    _dropped_in_entry: int = 0
    # How many of ``dropped`` the entry of the step under way names.

    @property
    def unfinished(self) -> list[int]:
        """Groups that are to be run, or are running."""
        return sorted(index for index, group in self.groups.items() if group.progress is not None)

    def progress(self, group: int) -> GroupProgress:
        """Where ``group`` is; whoever runs it goes on from there and keeps this up to date."""
        state = self.groups.setdefault(group, GroupState(index=group))
        state.progress = state.progress or GroupProgress()
        return state.progress

    def renew(self, group: int) -> None:
        """``group`` has begun anew: nothing that it sampled is left."""
        self.groups[group].renewed = self.groups[group].next_start

    def finish(self, group: int) -> None:
        """No member of ``group`` has to go on."""
        self.groups[group].progress = None

    def drop(self, group: int, reason: str) -> None:
        """``group`` was given up."""
        self.dropped.append((group, reason))
        del self.groups[group]

    def keep_columns(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Zero for each metric that an environment has ever reported, in ``metrics`` or before."""
        self.rollout_keys |= {key: 0.0 for key in metrics if key.startswith("rollout/")}
        return self.rollout_keys

    def begin(self, groups: Sequence[Group]) -> None:
        """A step begins, whose groups will be in this list."""
        self.step_groups = groups

    def entry(
        self,
        *,
        n: int,
        version: int,
        consumed: Sequence[GroupConsumed],
        loss: Loss,
        updates: Sequence[Update],
    ) -> JournalEntry:
        """What the journal says of step ``n``, which consists of these ``updates``."""
        self._dropped_in_entry = len(self.dropped)
        return JournalEntry(
            n=n,
            version=version,
            admitted=self.admission.admitted,
            consumed=tuple(
                Consumed(group=group.index, members=tuple(traj.member for traj in group.members_G), final=group.final)
                for group in self.step_groups
            ),
            dropped=tuple(self.dropped),
            renewed=tuple(group.renewed for group in self.groups.values() if group.renewed is not None),
            trained_members=sum(event.trained for event in consumed),
            dropped_members=sum((Counter(event.dropped) for event in consumed), Counter()),
            failed_attempts=self.ledger.totals.failed_attempts,
            rerolled=self.ledger.totals.rerolled,
            loss=repr(loss),
            updates=updates,
        )

    def commit(self, n: int) -> None:
        """Step ``n`` was committed. Called before anything else can happen."""
        groups, self.n, self.step_groups = self.step_groups, n, ()
        del self.dropped[: self._dropped_in_entry]
        self._dropped_in_entry = 0
        for group in groups:
            if group.final:
                del self.groups[group.index]
            else:
                self.groups[group.index].taken.update(traj.member for traj in group.members_G)

    def state(self) -> RunState:
        """The run as it is now. A step under way has not happened."""
        now = anyio.current_time()
        groups: dict[int, GroupState] = {}
        for index, (due, _) in sorted(self.admission.reservations().items()):
            group = self.groups.get(index) or GroupState(index=index)
            progress = None if group.progress is None else _copied(group.progress, now)
            groups[index] = replace(group, due=due, taken=set(group.taken), progress=progress, parts=[])
        for part in (*self.step_groups, *self.batches.waiting()):
            groups[part.index].parts.append(part)
        return RunState(
            n=self.n,
            version=self.clock.committed,
            admitted=self.admission.admitted,
            dropped=self.admission.dropped,
            totals=self._totals(len(groups)),
            groups=groups,
            sums=self.recorder.sums(),
            rollout_keys=tuple(self.rollout_keys),
            untrained=self.untrained.batches,
        )

    def _totals(self, open: int) -> LedgerTotals:
        """The ledger's. An observer that raised may have kept the last events from it; the owners know better."""
        totals = copy.deepcopy(self.ledger.totals)
        untold = self.admission.dropped - totals.dropped.total()
        totals.dropped.update(reason for _, reason in self.dropped[len(self.dropped) - untold :])
        totals.admitted = self.admission.admitted
        totals.consumed = totals.admitted - totals.dropped.total() - open
        return totals

    def restore(self, state: RunState) -> None:
        """Give ``state`` to the owners, which are new. Its ``unfinished`` groups are to be run."""
        self.n = state.n
        self.admission.restore(
            admitted=state.admitted,
            dropped=state.dropped,
            reservations={group.index: (group.due, len(group.taken)) for group in state.groups.values()},
        )
        self.recorder.resume(state.sums)
        self.rollout_keys = dict.fromkeys(state.rollout_keys, 0.0)
        for group in state.groups.values():
            progress = None if group.is_finished else group.progress or GroupProgress()
            self.groups[group.index] = replace(group, due=None, parts=[], progress=progress)
            for part in group.parts:
                self.batches.put(part)


def _copied(progress: GroupProgress, now: float) -> GroupProgress:
    copied = progress.copied(now)
    copied.active = {member: frozen(traj) for member, traj in copied.active.items()}
    return copied


def restored_ledger(state: RunState) -> Ledger:
    """The ledger of the run that ``state`` is in the middle of."""
    return Ledger(totals=state.totals, open={group.index: group.is_finished for group in state.groups.values()})
