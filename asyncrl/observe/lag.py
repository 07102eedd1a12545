"""How late the event loop is: what every tool result and every sampled segment waits for.

A timer is set again and again; its lateness is the time that callbacks held the loop. On a virtual clock nothing is
ever late, and a timer that never ends would hide a deadlock, so there the timer is not set.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import anyio

__all__ = ["LoopLag", "settled_heap"]

_INTERVAL_S = 0.05
# Twenty wake-ups a second cost nothing, and a callback that is too long is rarely alone.


class LoopLag:
    """Owns the lateness since the last ``take``. Start ``run`` in a task group."""

    def __init__(self) -> None:
        self._late_s = 0.0
        self._longest_s = 0.0
        self._ticks = 0

    async def run(self) -> None:
        """Measure until cancelled; return at once on a loop whose time is virtual."""
        if _is_virtual():
            return
        while True:
            expected = anyio.current_time() + _INTERVAL_S
            await anyio.sleep_until(expected)
            self.add(anyio.current_time() - expected)

    def add(self, late_s: float) -> None:
        """The timer came ``late_s`` seconds after it was due."""
        self._late_s += max(0.0, late_s)
        self._longest_s = max(self._longest_s, late_s)
        self._ticks += 1

    def take(self) -> Mapping[str, float]:
        """Mean and longest lateness in seconds since the last call."""
        metrics = {
            "loop/lag_mean_seconds": self._late_s / self._ticks if self._ticks else 0.0,
            "loop/lag_max_seconds": self._longest_s,
        }
        self._late_s = self._longest_s = 0.0
        self._ticks = 0
        return metrics


@contextmanager
def settled_heap() -> Iterator[None]:
    """Spare the block's garbage collections what exists already.

    Half a million objects of torch and of the model's code live as long as the run; a full collection that looks at
    them again holds the loop for tenths of a second. If the program froze its heap itself, nothing is changed; on a
    virtual clock there is nothing to hold.
    """
    if gc.get_freeze_count() or _is_virtual():
        yield
        return
    gc.collect()  # else garbage would be kept too
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_virtual() -> bool:
    return getattr(asyncio.get_running_loop(), "virtual", False)
