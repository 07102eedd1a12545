"""Time in which a server could work for us: it stands still while weights are changed or the server is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["HoldClock"]


class HoldClock:
    """Loop time less the time in which somebody held the server. Holds may overlap; none of them is counted twice.

    ``also``: a clock that stands still too whenever this one does.
    """

    def __init__(self, *, also: HoldClock | None = None) -> None:
        self._also = also
        self._holds = 0
        self._held_s = 0.0
        self._since = 0.0

    def now(self) -> float:
        """The time on this clock; only differences mean something."""
        return (_loop_time() if self._holds == 0 else self._since) - self._held_s

    def hold(self) -> None:
        """Stand still until ``let_go`` was called as often."""
        if self._holds == 0:
            self._since = _loop_time()
        self._holds += 1
        if self._also is not None:
            self._also.hold()

    def let_go(self) -> None:
        """Undo one ``hold``; without one, nothing happens."""
        if self._holds == 0:
            return
        self._holds -= 1
        if self._holds == 0:
            self._held_s += _loop_time() - self._since
        if self._also is not None:
            self._also.let_go()

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Stand still inside the block."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()


def _loop_time() -> float:
    # What anyio.current_time() says, for a tenth of its time: each request asks twice.
    return asyncio.get_running_loop().time()
