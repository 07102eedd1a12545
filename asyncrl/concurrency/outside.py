"""What a task waits for outside of its loop, said to a loop whose time is virtual.

A virtual clock jumps to its next deadline when no task can go on. A thread or a process at work looks like that, so
whoever waits for one says so, and the clock stands still meanwhile. Any other loop is told nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["waiting_outside"]


@contextmanager
def waiting_outside() -> Iterator[None]:
    """A block in which the task waits for a thread or a process: counted in ``VirtualClock.outside``."""
    loop: Any = asyncio.get_running_loop()
    if not getattr(loop, "virtual", False):
        yield
        return
    loop.outside += 1
    try:
        yield
    finally:
        loop.outside -= 1
