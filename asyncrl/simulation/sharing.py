"""Processor sharing: a station that divides its capacity equally between the requests in flight.

With ``n`` in flight each is served at the rate ``1 / n``. Service received since the start is the same number for all
of them, the *level*, which rises by ``1 / n`` a second; a request that needs ``w`` seconds of service leaves when the
level has risen by ``w``. So the order of leaving is known at any time, and an event costs O(log n).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import anyio

from asyncrl.concurrency.notifier import Notifier

__all__ = ["ProcessorSharing"]

_ROUNDING_S = 1e-9
# Of service or work; deadlines are computed from what is left, and back.


class ProcessorSharing:
    """Owns the level and who waits for which."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._level = 0.0
        self._since = 0.0
        # The level was computed for this time.
        self._waiting: list[tuple[float, int, anyio.Event]] = []
        self._tickets = count()
        self._timer: asyncio.TimerHandle | None = None
        # Of the next departure, or earlier: an arrival makes it later, and then the timer is set again.
        self._turned = Notifier()
        # Requests are in flight again, or none is.

    @contextmanager
    def request(self) -> Iterator[None]:
        """The block is a request in flight, whether it is served or not."""
        self._advance(1)
        if self.in_flight == 1:
            self._turned.notify()
        try:
            yield
        finally:
            self._advance(-1)
            self._set_timer()
            if not self.in_flight:
                self._turned.notify()

    async def serve(self, seconds: float) -> None:
        """Receive ``seconds`` of service, alone as many seconds."""
        self._advance(0)
        served = anyio.Event()
        waiter = (self._level + seconds, next(self._tickets), served)
        heapq.heappush(self._waiting, waiter)
        if self._waiting[0] is waiter:
            self._set_timer()
        try:
            await served.wait()
        finally:
            if not served.is_set():
                self._waiting.remove(waiter)
                heapq.heapify(self._waiting)

    async def work(self, seconds: float, *, speed: float) -> None:
        """Do what is not served here, but slowed down to ``speed`` while requests are in flight."""
        while seconds > _ROUNDING_S:
            started = anyio.current_time()
            pace = speed if self.in_flight else 1.0
            with anyio.move_on_after(seconds / pace):
                await self._turned.wait()
            seconds -= pace * (anyio.current_time() - started)

    def _advance(self, requests: int) -> None:
        """Bring the level up to now; from now on so many more requests are in flight."""
        now = asyncio.get_running_loop().time()
        self._level += (now - self._since) / self._sharers
        self._since = now
        self.in_flight += requests

    @property
    def _sharers(self) -> int:
        # What is no request, such as an update of the weights, is served between them, or alone.
        return max(1, self.in_flight)

    def _set_timer(self) -> None:
        # A timer of the loop: a task that sleeps and is woken would cost several times as much for each request.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            deadline = self._since + (self._waiting[0][0] - self._level) * self._sharers
            self._timer = asyncio.get_running_loop().call_at(deadline, self._leave)

    def _leave(self) -> None:
        self._advance(0)
        while self._waiting and self._waiting[0][0] <= self._level + _ROUNDING_S:
            _, _, served = heapq.heappop(self._waiting)
            served.set()
        self._set_timer()
