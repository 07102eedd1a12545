"""Waking whoever waits for a state to change, without polling and without a lock."""

from __future__ import annotations

from collections.abc import Callable

import anyio

__all__ = ["Notifier"]


class Notifier:
    """Owners notify it after each change; waiters look at their condition again, and only then."""

    def __init__(self) -> None:
        self._next: anyio.Event | None = None

    def notify(self) -> None:
        """Something changed: every waiter looks again."""
        if self._next is not None:
            self._next.set()
            self._next = None

    async def wait(self) -> None:
        """Wait for the next change."""
        if self._next is None:
            self._next = anyio.Event()
        await self._next.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` holds; it holds when this returns, for nothing runs in between."""
        while not condition():
            await self.wait()
