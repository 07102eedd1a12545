"""A counting semaphore that serves the oldest first.

``Schedule.concurrency`` and ``max_sample_requests`` are two of these. A freed slot goes to the waiter with the smallest
order, and it is that waiter's from the moment of the release: nobody who asks later can take it in between. The limit
may change: when it shrinks, slots in use stay with their holders and are not given on until few enough are left.
"""

from __future__ import annotations

import heapq
from itertools import count

import anyio

__all__ = ["OrderedSlots"]


class _Waiter:
    __slots__ = ("cancelled", "granted", "woken")

    def __init__(self) -> None:
        self.woken = anyio.Event()
        self.granted = False
        self.cancelled = False


class OrderedSlots:
    """``limit`` slots. The order of a waiter is (admission order of its group, member)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self.waiting = 0
        self._waiters: list[tuple[tuple[int, int], int, _Waiter]] = []
        self._tickets = count()

    def set_limit(self, limit: int) -> None:
        """Change the number of slots, at least 1; the oldest waiters get those that are new.

        With 5 of 5 in use and 2 waiting, ``set_limit(3)`` changes nothing at first; the first 2 releases only lower
        the use to 3, and from then on each release serves a waiter.
        """
        if limit < 1:
            raise ValueError(f"limit is {limit}, but must be at least 1")
        self.limit = limit
        while self.in_use < self.limit and self._grant():
            self.in_use += 1

    def acquire_nowait(self) -> bool:
        """Take a slot if one is free. Free slots and waiters never exist together, so this jumps no queue."""
        if self.in_use < self.limit:
            self.in_use += 1
            return True
        return False

    async def acquire(self, order: tuple[int, int]) -> None:
        """Take a slot, waiting behind every smaller ``order``. Cancelling it leaves the queue, or returns the slot."""
        if self.acquire_nowait():
            return
        waiter = _Waiter()
        heapq.heappush(self._waiters, (order, next(self._tickets), waiter))
        self.waiting += 1
        try:
            await waiter.woken.wait()
        except BaseException:
            if waiter.granted:
                self.release()
            waiter.cancelled = True
            raise
        finally:
            self.waiting -= 1

    def release(self) -> None:
        """Give a slot back: to the oldest waiter, else to the free ones."""
        if self.in_use > self.limit or not self._waiters or not self._grant():
            self.in_use -= 1

    def _grant(self) -> bool:
        """Wake the oldest waiter as the holder of a slot; False if nobody waits."""
        while self._waiters:
            _, _, waiter = heapq.heappop(self._waiters)
            if not waiter.cancelled:
                waiter.granted = True
                waiter.woken.set()
                return True
        return False
