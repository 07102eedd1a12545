"""Admission: the reservations, from the right to run a group until its update is published.

A group takes a slot when it is admitted. It is *born* when its first segment is dispatched; until then it has no age,
so a queue never grows old. A group may end unborn, if each of its members was truncated or failed before its first
request: it keeps having no age. The trainer takes it into a batch; its slot comes back when the version that the batch
made is published, or at once if it made none. Freeing it at the commit would break the barrier's proof (staleness.py)
as soon as publication lags.

A slot has as many *places* as a group has members. Whole groups leave with all of them. Where a group's stragglers are
carried over, the members that are taken first give their places back first; else finished groups that wait for one
straggler each could hold every slot, and the trainer would starve.

A group that is dropped gives its slot back at once, and another is admitted in its place as long as there are rows. A
group that is rolled out anew keeps its slot and is unborn again: nothing that it sampled is left, so that its next
first segment is a birth like any other, to which the barrier's proof applies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import anyio

from asyncrl.concurrency.notifier import Notifier
from asyncrl.errors import StalenessError
from asyncrl.scheduling.staleness import due_step

__all__ = ["Admission", "SlotWait"]


class SlotWait:
    """Owns the seconds that the trainer waited for slots that only a publication frees.

    No faster sampling would save them. ``note`` is called at each change; between two calls nothing changes.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def note(self, *, waits: bool) -> None:
        """From now on the trainer waits for such a slot, or does not."""
        if waits and self._since is None:
            self._since = anyio.current_time()
        elif not waits and self._since is not None:
            self._seconds += anyio.current_time() - self._since
            self._since = None

    def take(self) -> float:
        """The seconds since the last call. Nobody waits at the moment."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Admission:
    """Owns the slots and the due steps of outstanding groups.

    Outstanding: admitted, and neither taken into a batch nor dropped. Every method is synchronous but ``admit``.
    ``groups`` are wanted in all, without those that are dropped; there are ``rows`` to make them from. A batch makes
    up to ``updates`` versions, and the bound holds for the last of them too.
    """

    def __init__(
        self,
        *,
        slots: int,
        max_staleness: int,
        updates: int = 1,
        group_size: int = 1,
        groups: float = math.inf,
        rows: float = math.inf,
    ) -> None:
        self.slots = slots
        self.admitted = 0
        """Groups admitted so far; the next group's index."""
        self.dropped = 0
        """Groups of them that will never be trained."""
        self._groups = groups
        self._rows = rows
        self._max_staleness = max_staleness
        self._updates = updates
        self._group_size = group_size
        self._due: dict[int, int | None] = {}
        # Outstanding group -> its due step, None until it is born.
        self._due_counts: dict[int, int] = {}
        self._taken: Counter[int] = Counter()
        # Outstanding group -> members that left it early.
        self._places = 0
        # In use, of slots * group_size.
        self._batch_places = 0
        # Places of the batch that is being trained.
        self._before_batch: dict[int, tuple[int | None, int]] = {}
        # Reservations of the groups of that batch, as they were before it.
        self._unpublished: dict[int, int] = {}
        # Committed version -> places of the batch that made it.
        self._expected = 0
        # Groups that the trainer waits for.
        self.slot_wait = SlotWait()
        self._changed = Notifier()

    @property
    def outstanding(self) -> int:
        """Groups admitted and not taken or dropped."""
        return len(self._due)

    @property
    def remaining(self) -> float:
        """Groups that batches can still get: outstanding ones and those that may yet be admitted."""
        return self._quota - self.admitted + len(self._due)

    @property
    def slots_in_use(self) -> int:
        """Slots in use; one that some members have left early counts whole."""
        return -(-self._places // self._group_size)

    @property
    def due_counts(self) -> Mapping[int, int]:
        """Due step -> born outstanding groups."""
        return self._due_counts

    def reservations(self) -> Mapping[int, tuple[int | None, int]]:
        """Group -> its due step and how many of its members finished batches have taken, for each outstanding group.

        As if the batch being trained had not been taken: that is what is left if its step does not happen.
        """
        now = {group: (due, self._taken.get(group, 0)) for group, due in self._due.items()}
        return now | self._before_batch

    def restore(self, *, admitted: int, dropped: int, reservations: Mapping[int, tuple[int | None, int]]) -> None:
        """Go on from the reservations of an earlier process. Every version that it committed is published."""
        self.admitted = admitted
        self.dropped = dropped
        for group, (due, taken) in reservations.items():
            self._due[group] = due
            self._count_in(due)
            if taken:
                self._taken[group] = taken
            self._places += self._group_size - taken

    def is_outstanding(self, group: int) -> bool:
        """True from its admission until it is taken whole, or dropped."""
        return group in self._due

    def due(self, group: int) -> int | None:
        """Due step of an outstanding group, None before its birth."""
        return self._due[group]

    def admit_nowait(self) -> int | None:
        """Reserve a slot for the next group and return its index, or None if no slot is free or no group wanted."""
        if not self._may_admit():
            return None
        group = self.admitted
        self.admitted += 1
        self._due[group] = None
        self._places += self._group_size
        self._note_slot_wait()
        return group

    async def admit(self) -> int:
        """Reserve a slot for the next group, waiting for one, and for a group to be wanted."""
        await self._changed.wait_until(self._may_admit)
        group = self.admit_nowait()
        if group is None:
            raise StalenessError(f"{self.slots_in_use} of {self.slots} slots are held, but one was said to be free")
        return group

    def birth(self, group: int, version: int) -> int | None:
        """The group dispatches a segment under ``version``: its due step if this is its birth, else None."""
        if self._due[group] is not None:
            return None
        due = due_step(version, max_staleness=self._max_staleness, updates=self._updates)
        self._due[group] = due
        self._count_in(due)
        return due

    def renew(self, group: int) -> None:
        """The group starts afresh and nothing that it sampled is left: it is not born any more."""
        self._count_out(self._due[group])
        self._due[group] = None

    def take(self, groups: Iterable[int]) -> None:
        """The trainer takes these groups into its batch; they keep their slots until ``end_batch``."""
        for group in groups:
            self._remember(group)
            self._batch_places += self._leave(group)

    def take_members(self, group: int, members: int) -> None:
        """The trainer takes ``members`` of a group that stays outstanding for its others."""
        self._remember(group)
        self._taken[group] += members
        self._batch_places += members

    def expect(self, groups: int) -> None:
        """The trainer waits until so many groups are finished; 0: not any more."""
        self._expected = groups
        self._note_slot_wait()

    def end_batch(self, version: int | None) -> None:
        """The batch being trained is over: ``version`` is the last that it made; None: its slots are free at once."""
        if version is None:
            self._free(self._batch_places)
        else:
            self._unpublished[version] = self._batch_places
        self._batch_places = 0
        self._before_batch.clear()

    def published(self, version: int) -> None:
        """``version`` is live on every server: the slots of the batches up to it are free."""
        for made in [made for made in self._unpublished if made <= version]:
            self._free(self._unpublished.pop(made))

    def drop(self, group: int) -> None:
        """The group will never be trained: its slot is free at once, and another group is wanted."""
        self.dropped += 1
        self._free(self._leave(group))

    @property
    def _quota(self) -> float:
        """Groups to admit in all, as things stand."""
        return min(self._groups + self.dropped, self._rows)

    def _may_admit(self) -> bool:
        return self._places < self.slots * self._group_size and self.admitted < self._quota

    def _free(self, places: int) -> None:
        self._places -= places
        self._changed.notify()
        self._note_slot_wait()

    def _note_slot_wait(self) -> None:
        """The trainer waits for a publication if the outstanding groups are too few for it, others are wanted, and
        every slot for them is held, some by batches that are not published."""
        waits = False
        if self._expected and self._unpublished and self.admitted < self._quota and not self._may_admit():
            coming = self._places - self._batch_places - sum(self._unpublished.values())
            waits = coming < min(self._expected, self.remaining) * self._group_size
        self.slot_wait.note(waits=waits)

    def _leave(self, group: int) -> int:
        """Forget an outstanding group; returns the places that it still has."""
        self._count_out(self._due.pop(group))
        return self._group_size - self._taken.pop(group, 0)

    def _remember(self, group: int) -> None:
        self._before_batch.setdefault(group, (self._due[group], self._taken.get(group, 0)))

    def _count_in(self, due: int | None) -> None:
        if due is not None:
            self._due_counts[due] = self._due_counts.get(due, 0) + 1

    def _count_out(self, due: int | None) -> None:
        if due is not None:
            self._due_counts[due] -= 1
            if not self._due_counts[due]:
                del self._due_counts[due]
