"""Batches: finished groups, and which of them the trainer may take now.

Ready groups are kept by due step, of which there are at most S + 1, so that a decision costs O(S) however many groups
there are. A group that ended before any of its segments was dispatched has no due step. Nothing is gained by letting
it wait, so it goes first, as far as the barrier lets it take the place of a group that has one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

import anyio

from asyncrl.concurrency.notifier import Notifier
from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.rules import BatchOrder, ForwardBackwardBatch
from asyncrl.scheduling.staleness import feasible, needed
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.types import BarrierWait, Group

__all__ = ["Batches"]

_Opener: TypeAlias = tuple[int, Group | None]
# The group that opened the barrier: by being ready, or None, by failing.


class Batches:
    """Owns the finished groups that no batch has taken.

    ``updates``: versions that a batch makes, at most. ``bounded``: keep the barrier (``stale_policy="wait"``).
    ``split_size``: a batch of n groups is n times as many members, of whatever groups, because stragglers are carried
    over; None keeps groups whole. The number of ready groups is bounded by admission's slots.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        clock: PolicyClock,
        groups_per_step: int,
        updates: int = 1,
        order: BatchOrder = "completion",
        bounded: bool = True,
        split_size: int | None = None,
    ) -> None:
        self._admission = admission
        self._clock = clock
        self._groups_per_step = groups_per_step
        self._updates = updates
        self._order = order
        self._bounded = bounded
        self._split_size = split_size
        self._ready: dict[int, Group] = {}
        self._dues: dict[int, int | None] = {}
        # Ready group -> its due step; None of one that was never born.
        self._by_due: defaultdict[int | None, OrderedDict[int, None]] = defaultdict(OrderedDict)
        # Due step -> ready groups, first finished first.
        self._in_order: deque[int] = deque()
        self._next_in_order = 0
        # The ready groups that no older outstanding one precedes, and the first that is not among them.
        self._sequences = 0
        self._tokens = 0
        self._changed = Notifier()
        self._awaited = 0
        self._opener: _Opener | None = None
        # Groups that a trainer at the barrier wants, and who let it pass.
        self._waits: list[BarrierWait] = []

    @property
    def ready(self) -> int:
        """Finished groups that no batch has taken."""
        return len(self._ready)

    def take_waits(self) -> tuple[BarrierWait, ...]:
        """The trainer's waits at the barrier since the last call."""
        waits, self._waits = tuple(self._waits), []
        return waits

    def waiting(self) -> list[Group]:
        """Those groups, and parts of groups, first finished first."""
        return list(self._ready.values())

    def put(self, group: Group) -> None:
        """``group`` is ready, or a part of it. Never waits: its slot is its place here."""
        before = self._ready.get(group.index)
        self._ready[group.index] = group
        if before is not None:
            self._ready[group.index] = replace(group, members_G=[*before.members_G, *group.members_G])
            self._unplace(group.index)  # the part that is there may be of before the group's birth
        due = self._dues[group.index] = self._admission.due(group.index)
        self._by_due[due][group.index] = None
        self._sequences += len(group.members_G)
        self._tokens += group.context_tokens
        self._note_opener(group.index, group)
        self._changed.notify()

    def drop(self, group: int) -> None:
        """``group`` will never be ready. The barrier may open by that, and a batch may have to be smaller."""
        self._admission.drop(group)
        self._note_opener(group)
        self._changed.notify()

    def renew(self, group: int) -> None:
        """``group`` starts afresh, and is not due any more. The barrier may open by that."""
        self._admission.renew(group)
        self._note_opener(group)
        self._changed.notify()

    def obtainable(self, size: int) -> int:
        """``size`` groups, or as many as there will ever be."""
        return int(min(size, self._admission.remaining))

    def take_nowait(self, size: int) -> list[Group] | None:
        """Take ``size`` groups if the commit that trains them leaves every other group trainable in time.

        Fewer if no more will come; see ``obtainable``.
        """
        size = self.obtainable(size)
        if not self._enough(size):
            return None
        if self._split_size is not None:
            return self._take_members(size * self._split_size)
        chosen = self._choose(size)
        return None if chosen is None else self._take_whole(chosen)

    async def take(self, size: int) -> list[Group]:
        """Take ``size`` groups, waiting for samples and at the barrier. Fewer, or none, if no more will come."""
        with self._expecting(size):
            await self._changed.wait_until(lambda: self._enough(self.obtainable(size)))
        batch = self.take_nowait(size)
        if batch is not None:
            return batch
        started = anyio.current_time()
        self._awaited = size
        try:
            while batch is None:
                await self._changed.wait()
                batch = self.take_nowait(size)
            opener = self._opener
        finally:
            self._awaited = 0
            self._opener = None
        if opener is not None:
            self._waits.append(_barrier_wait(*opener, seconds=anyio.current_time() - started))
        return batch

    async def take_chunk(self, remaining: int, threshold: ForwardBackwardBatch) -> list[Group]:
        """Take finished groups of the current batch once they are worth a pass, or are all that ``remain``.

        None at all if the batch is already complete, because the groups that it still wanted were dropped.

        Only for synchronous runs: there every outstanding group belongs to the current batch, so the barrier is open.
        """
        with self._expecting(remaining):
            await self._changed.wait_until(
                lambda: (
                    len(self._ready) >= self.obtainable(remaining)
                    or threshold.reached(sequences=self._sequences, tokens=self._tokens)
                )
            )
        return self._take_whole(sorted(self._ready)[:remaining])

    @contextmanager
    def _expecting(self, size: int) -> Iterator[None]:
        self._admission.expect(size)
        try:
            yield
        finally:
            self._admission.expect(0)

    def _enough(self, size: int) -> bool:
        return len(self._ready) >= size if self._split_size is None else self._sequences >= size * self._split_size

    def _note_opener(self, index: int, group: Group | None = None) -> None:
        if self._awaited and self._opener is None and self._choose(self.obtainable(self._awaited)) is not None:
            self._opener = index, group

    def _choose(self, size: int) -> list[int] | None:
        """The groups of the next batch, None if there are too few or the barrier is closed."""
        if self._order == "admission":
            self._extend_order()
            chosen = list(islice(self._in_order, size))
            return chosen if len(chosen) == size and self._leaves_feasible(self._counted(chosen)) else None
        if len(self._ready) < size:
            return None
        unborn = self._unborn(size)
        counts = self._earliest_due(size - len(unborn))
        if not self._leaves_feasible(counts):
            return None
        return [index for due, count in counts.items() for index in islice(self._by_due[due], count)] + unborn

    def _unborn(self, size: int) -> list[int]:
        """Ready groups without a due step, for the places of a batch of ``size`` that need no other group.

        If the others that it needs are not ready, what the batch leaves is not feasible.
        """
        if None not in self._by_due:
            return []
        places = size
        if self._bounded:
            places -= needed(
                self._admission.due_counts,
                version=self._clock.committed + self._updates,
                groups_per_step=self._groups_per_step,
                updates=self._updates,
            )
        return list(islice(self._by_due[None], max(0, places)))

    def _counted(self, chosen: list[int]) -> dict[int, int]:
        return Counter(due for index in chosen if (due := self._dues[index]) is not None)

    def _extend_order(self) -> None:
        while self._next_in_order < self._admission.admitted:
            if self._next_in_order in self._ready:
                self._in_order.append(self._next_in_order)
            elif self._admission.is_outstanding(self._next_in_order):
                return
            self._next_in_order += 1

    def _earliest_due(self, size: int) -> dict[int, int]:
        """Due step -> how many of the ``size`` earliest due ready groups have it."""
        counts: dict[int, int] = {}
        for due in sorted(due for due in self._by_due if due is not None):
            if not size:
                break
            counts[due] = min(len(self._by_due[due]), size)
            size -= counts[due]
        return counts

    def _leaves_feasible(self, taken: Mapping[int, int]) -> bool:
        return not self._bounded or feasible(
            self._admission.due_counts,
            version=self._clock.committed + self._updates,
            groups_per_step=self._groups_per_step,
            updates=self._updates,
            taken=taken,
        )

    def _take_whole(self, chosen: list[int]) -> list[Group]:
        groups = [self._remove(index) for index in chosen]
        self._admission.take(chosen)
        return groups

    def _take_members(self, members: int) -> list[Group]:
        """Take ``members`` of the earliest due ready groups; the last of these may be cut in two."""
        groups: list[Group] = []
        while members:
            due = None if None in self._by_due else min(due for due in self._by_due if due is not None)
            group = self._remove(next(iter(self._by_due[due])))
            if len(group.members_G) > members:
                rest = replace(group, members_G=group.members_G[members:])
                group = replace(group, members_G=group.members_G[:members], final=False)
                self.put(rest)
            if group.final:
                self._admission.take([group.index])
            else:
                self._admission.take_members(group.index, len(group.members_G))
            members -= len(group.members_G)
            groups.append(group)
        return groups

    def _remove(self, index: int) -> Group:
        self._unplace(index)
        if self._in_order and self._in_order[0] == index:
            self._in_order.popleft()
        group = self._ready.pop(index)
        self._sequences -= len(group.members_G)
        self._tokens -= group.context_tokens
        return group

    def _unplace(self, index: int) -> None:
        due = self._dues.pop(index)
        bucket = self._by_due[due]
        del bucket[index]
        if not bucket:
            del self._by_due[due]


def _barrier_wait(index: int, group: Group | None, *, seconds: float) -> BarrierWait:
    """A wait for group ``index``, which is ready as ``group`` or has failed."""
    if group is None:
        return BarrierWait(seconds=seconds, group=index, member=-1, doing="failing")
    last = next((member for member in group.members_G if member.member == group.last_member), None)
    doing = "" if last is None else last.slowest
    return BarrierWait(seconds=seconds, group=index, member=group.last_member, doing=doing)
