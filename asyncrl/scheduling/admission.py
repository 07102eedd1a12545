"""Admission: the reservations, from the right to run a group until its update is published.

A group takes a slot when it is admitted. It is *born* when its first segment is dispatched; until then it has no age,
so a queue never grows old. The trainer takes it into a batch; its slot comes back when the version that the batch
made is published, or at once if it made none. Freeing it at the commit would break the barrier's proof (staleness.py)
as soon as publication lags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from asyncrl.errors import StalenessError
from asyncrl.scheduling.pulse import Pulse

__all__ = ["Admission"]


class Admission:
    """Owns the slots and the due steps of outstanding groups.

    Outstanding: admitted, and neither taken into a batch nor dropped. Every method is synchronous but ``admit``.
    """

    def __init__(self, *, slots: int, max_staleness: int) -> None:
        self.slots = slots
        self.admitted = 0
        """Groups admitted so far; the next group's index."""
        self._max_staleness = max_staleness
        self._due: dict[int, int | None] = {}
        # Outstanding group -> its due step, None until it is born. Insertion order is admission order.
        self._due_counts: Counter[int] = Counter()
        self._unsettled = 0
        # Groups in the batch that is being trained.
        self._unpublished: Counter[int] = Counter()
        # Committed version -> groups of the batch that made it.
        self._changed = Pulse()

    @property
    def outstanding(self) -> int:
        """Groups admitted and not taken or dropped."""
        return len(self._due)

    @property
    def held(self) -> int:
        """Slots in use."""
        return len(self._due) + self._unsettled + self._unpublished.total()

    @property
    def due_counts(self) -> Mapping[int, int]:
        """Due step -> born outstanding groups."""
        return self._due_counts

    def due(self, group: int) -> int | None:
        """Due step of an outstanding group, None before its birth."""
        return self._due[group]

    def oldest(self, count: int) -> list[int]:
        """The first ``count`` outstanding groups in admission order."""
        return [group for group, _ in zip(self._due, range(count), strict=False)]

    def admit_nowait(self) -> int | None:
        """Reserve a slot for the next group and return its index, or None if no slot is free."""
        if self.held >= self.slots:
            return None
        group = self.admitted
        self.admitted += 1
        self._due[group] = None
        return group

    async def admit(self) -> int:
        """Reserve a slot for the next group, waiting for one."""
        await self._changed.wait_until(lambda: self.held < self.slots)
        group = self.admit_nowait()
        if group is None:
            raise StalenessError(f"{self.held} of {self.slots} slots are held, but one was said to be free")
        return group

    def birth(self, group: int, version: int) -> int | None:
        """The group dispatches a segment under ``version``: its due step if this is its birth, else None."""
        if self._due[group] is not None:
            return None
        due = version + self._max_staleness
        self._due[group] = due
        self._due_counts[due] += 1
        return due

    def take(self, groups: Iterable[int]) -> None:
        """The trainer takes these groups into its batch; they keep their slots until ``settle``."""
        for group in groups:
            self._leave(group)
            self._unsettled += 1

    def settle(self, version: int | None) -> None:
        """The batch being trained is over: it made ``version``, or None and its slots are free at once."""
        if version is not None:
            self._unpublished[version] = self._unsettled
        self._unsettled = 0
        self._changed.notify()

    def published(self, version: int) -> None:
        """``version`` is live on every server: the slots of the batches up to it are free."""
        for made in [made for made in self._unpublished if made <= version]:
            del self._unpublished[made]
        self._changed.notify()

    def drop(self, group: int) -> None:
        """The group will never be trained: its slot is free at once."""
        self._leave(group)
        self._changed.notify()

    def _leave(self, group: int) -> None:
        due = self._due.pop(group)
        if due is None:
            return
        self._due_counts[due] -= 1
        if not self._due_counts[due]:
            del self._due_counts[due]
