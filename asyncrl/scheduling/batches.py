"""Batches: finished groups, and which of them the trainer may take now (DESIGN.md 4.6, 4.10, 4.11)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import islice

import anyio

from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.policyclock import PolicyClock
from asyncrl.scheduling.pulse import Pulse
from asyncrl.scheduling.rules import BatchOrder, ForwardBackwardBatch
from asyncrl.scheduling.staleness import feasible
from asyncrl.types import Group

__all__ = ["BarrierWait", "Batches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierWait:
    """Enough groups were ready for ``seconds``, but the barrier waited; ``group`` is the earliest due one missing."""

    seconds: float
    group: int | None


class Batches:
    """Owns the finished groups that no batch has taken.

    ``bounded``: keep the barrier (``stale_policy="wait"``). The number of ready groups is bounded by admission's slots.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        clock: PolicyClock,
        groups_per_step: int,
        order: BatchOrder = "completion",
        bounded: bool = True,
    ) -> None:
        self._admission = admission
        self._clock = clock
        self._groups_per_step = groups_per_step
        self._order = order
        self._bounded = bounded
        self._ready: dict[int, Group] = {}
        self._by_due: dict[int, OrderedDict[int, None]] = {}
        # Due step -> ready groups, first finished first: at most S + 1 steps, so a decision costs O(S).
        self._sequences = 0
        self._tokens = 0
        self._changed = Pulse()
        self.waits: list[BarrierWait] = []
        """Barrier waits since the trainer last cleared them."""

    @property
    def ready(self) -> int:
        """Finished groups that no batch has taken."""
        return len(self._ready)

    def put(self, group: Group) -> None:
        """All members of ``group`` ended. Never waits: its slot is its place here."""
        due = self._admission.due(group.index)
        if due is None:
            raise ValueError(f"group {group.index} ended without a dispatched segment")
        self._ready[group.index] = group
        self._by_due.setdefault(due, OrderedDict())[group.index] = None
        self._sequences += len(group.members_G)
        self._tokens += group.context_tokens
        self._changed.notify()

    def take_nowait(self, size: int) -> list[Group] | None:
        """Take ``size`` groups if the commit that trains them leaves every other group trainable in time."""
        if len(self._ready) < size:
            return None
        if self._order == "admission":
            chosen = self._admission.oldest(size)
            if any(index not in self._ready for index in chosen):
                return None
            return self._remove(chosen) if self._leaves_feasible(self._dues(chosen)) else None
        taken = self._earliest_due(size)
        if not self._leaves_feasible(taken):
            return None
        return self._remove([index for due in taken for index in islice(self._by_due[due], taken[due])])

    async def take(self, size: int) -> list[Group]:
        """Take ``size`` groups, waiting for samples and at the barrier."""
        await self._changed.wait_until(lambda: len(self._ready) >= size)
        batch = self.take_nowait(size)
        if batch is not None:
            return batch
        started = anyio.current_time()
        missing = self._missing()
        while batch is None:
            await self._changed.wait()
            batch = self.take_nowait(size)
        self.waits.append(BarrierWait(seconds=anyio.current_time() - started, group=missing))
        return batch

    async def take_chunk(self, remaining: int, threshold: ForwardBackwardBatch) -> list[Group]:
        """Take finished groups of the current batch once they are worth a pass, or are all that ``remain``.

        Only for synchronous runs: there every outstanding group belongs to the current batch, so the barrier is open.
        """
        await self._changed.wait_until(
            lambda: len(self._ready) >= remaining or threshold.reached(sequences=self._sequences, tokens=self._tokens)
        )
        return self._remove(sorted(self._ready)[:remaining])

    def _earliest_due(self, size: int) -> Counter[int]:
        """Due step -> how many of the ``size`` earliest due ready groups have it."""
        taken: Counter[int] = Counter()
        for due in sorted(self._by_due):
            count = min(len(self._by_due[due]), size - taken.total())
            if count:
                taken[due] = count
        return taken

    def _dues(self, chosen: list[int]) -> Counter[int]:
        return Counter(due for index in chosen if (due := self._admission.due(index)) is not None)

    def _leaves_feasible(self, taken: Counter[int]) -> bool:
        if not self._bounded:
            return True
        rest = Counter(self._admission.due_counts)
        rest.subtract(taken)
        return feasible(rest, version=self._clock.committed + 1, groups_per_step=self._groups_per_step)

    def _missing(self) -> int | None:
        """The earliest due group that is not ready: the one that the barrier waits for."""
        running = [group for group in self._admission.oldest(self._admission.outstanding) if group not in self._ready]
        born = [(due, group) for group in running if (due := self._admission.due(group)) is not None]
        return min(born)[1] if born else None

    def _remove(self, chosen: list[int]) -> list[Group]:
        groups = []
        for index in chosen:
            due = self._admission.due(index)
            if due is None:
                raise ValueError(f"group {index} is ready but was never born")
            bucket = self._by_due[due]
            del bucket[index]
            if not bucket:
                del self._by_due[due]
            group = self._ready.pop(index)
            self._sequences -= len(group.members_G)
            self._tokens -= group.context_tokens
            groups.append(group)
        self._admission.take(chosen)
        return groups
