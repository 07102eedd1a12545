"""How late the event loop is: what every tool result and every sampled segment waits for.

A timer is set again and again; its lateness is the time that callbacks held the loop. On a virtual clock nothing is
ever late, and a timer that never ends would hide a deadlock, so there the timer is not set.

Whoever holds the loop for long is named: a thread looks on, because nothing on the loop can, and when the timer does
not come it reads off the loop's stack which function is running. That costs nothing while all is well.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import anyio
import anyio.to_thread

from asyncrl.events import Events, Notice
from asyncrl.rollout.usercode import is_user_file

__all__ = ["LoopLag", "settled_heap"]

_INTERVAL_S = 0.05
# Twenty wake-ups a second cost nothing, and a callback that is too long is rarely alone.
_HELD_S = 0.25
# As long as many a tool call: everybody waits that long for one.
_USUAL_YOUNG = 2000
# The largest threshold that a version of Python begins with.
_THRESHOLDS = (10_000, 3, 2)
# A thousand trajectories under way have tens of thousands of objects, and all live longer than the usual 700
# allocations: to look at them so often frees nothing. Full collections are as frequent as with the usual (700, 10, 10).


class LoopLag:
    """Owns the lateness since the last ``take``. Start ``run`` in a task group.

    With ``events``, a ``Notice`` names each function that holds the loop for ``_HELD_S``; again if it does so for twice
    as long.
    """

    def __init__(self, events: Events | None = None) -> None:
        self._events = events
        self._reported: dict[str, float] = {}
        # Function -> longest lateness that was told.
        self._late_s = 0.0
        self._longest_s = 0.0
        self._ticks = 0

    async def run(self) -> None:
        """Measure until cancelled; return at once on a loop whose time is virtual."""
        if _is_virtual():
            return
        onlooker = _Onlooker()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(onlooker.run)
                while True:
                    expected = anyio.current_time() + _INTERVAL_S
                    await anyio.sleep_until(expected)
                    late = anyio.current_time() - expected
                    self.add(late)
                    seen = onlooker.tick()
                    if late >= _HELD_S and seen:
                        self._report(seen, late)
        finally:
            onlooker.leave()

    def _report(self, function: str, late_s: float) -> None:
        if self._events is not None and late_s >= 2 * self._reported.get(function, 0.0):
            self._reported[function] = late_s
            keys = {"function": function, "seconds": round(late_s, 3)}
            self._events.emit(Notice(time=anyio.current_time(), name="loop_held", level="warning", keys=keys))

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


class _Onlooker:
    """Sees what the loop's thread is doing when it has not ticked for a while."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._left = threading.Event()
        self._ticks = 0
        self._seen = ""

    async def run(self) -> None:
        """Look on until ``leave``."""
        await anyio.to_thread.run_sync(self._look_on, limiter=anyio.CapacityLimiter(1), abandon_on_cancel=True)

    def tick(self) -> str:
        """The loop is running; returns what was seen to hold it since the last tick, or an empty string."""
        self._ticks += 1
        seen, self._seen = self._seen, ""
        return seen

    def leave(self) -> None:
        """End ``run``'s thread."""
        self._left.set()

    def _look_on(self) -> None:
        before = -1
        # A thread cannot be woken by a loop that is held: it has to look by itself.
        while not self._left.wait(_HELD_S / 2):
            if self._ticks == before and not self._seen:
                frame = sys._current_frames().get(self._thread)  # the only way to another thread's stack
                self._seen = "" if frame is None else _responsible(frame)
            before = self._ticks


def _responsible(frame: FrameType) -> str:
    """The innermost function of the user's; empty if there is none, for then it is not theirs to mend."""
    found: FrameType | None = frame
    while found is not None and not is_user_file(found.f_code.co_filename):
        found = found.f_back
    if found is None:
        return ""
    return f"{found.f_code.co_qualname} ({found.f_code.co_filename}:{found.f_code.co_firstlineno})"


@contextmanager
def settled_heap() -> Iterator[None]:
    """Spare the block's garbage collections what exists already.

    Half a million objects of torch and of the model's code live as long as the run; a full collection that looks at
    them again holds the loop for tenths of a second. Young objects are looked at less often. If the program froze its
    heap itself, nothing is changed; on a virtual clock there is nothing to hold.
    """
    if _is_virtual() or gc.get_freeze_count():  # in this order: the count is a walk over what is frozen
        yield
        return
    thresholds = gc.get_threshold()
    gc.collect()  # else garbage would be kept too
    gc.freeze()
    if 0 < thresholds[0] <= _USUAL_YOUNG:  # the program has not chosen its own
        gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _is_virtual() -> bool:
    return getattr(asyncio.get_running_loop(), "virtual", False)
