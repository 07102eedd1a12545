"""A virtual clock: an event loop whose time passes at once, in an order that a seed decides.

``VirtualClock`` is asyncio's selector loop with two changes. Its ``time()`` is a number, and where the real loop
would sleep until the next deadline it adds the waiting time to that number instead. An hour of timeouts and sleeps
passes in milliseconds, deadlines are exact, and every anyio primitive works unchanged. With a ``seed`` the ready
queue is shuffled before each pass, so that one test explores many task orders and each of them can be repeated.

If every task is blocked and no deadline is pending, the loop raises ``Deadlock``: a hang becomes a failing test.

What is outside the loop looks like idleness. A worker thread or a socket in flight lets the clock jump past its
deadline, so a scheduling test uses fakes. ``grace_s`` waits that long in real time before each jump for a thread that
cannot be avoided.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import anyio

__all__ = ["Deadlock", "VirtualClock", "run_virtual"]

T = TypeVar("T")
_LONGEST_SELECT_S = 24 * 3600.0
# asyncio caps each wait at a day; a longer one is simply waited for in parts.


class Deadlock(RuntimeError):
    """Every task is blocked and nothing will ever wake one."""


class _JumpingSelector(selectors.DefaultSelector):
    """Polls the real file descriptors and turns waiting into a jump of the loop's clock."""

    def __init__(self, grace_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self.next_deadline: Callable[[], float] = lambda: 0.0
        self._grace_s = grace_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(
            0 if timeout is not None and timeout <= 0 else self._grace_s
        )
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise Deadlock(f"at {self.now} s every task is blocked and no deadline is pending")
        # The deadline itself and not now + timeout, which may miss it by one rounding.
        self.now = self.next_deadline() if timeout < _LONGEST_SELECT_S else self.now + timeout
        return ready


class VirtualClock(asyncio.SelectorEventLoop):
    """The loop. Use it as ``loop_factory``, or through ``run_virtual``.

    ``seed``: shuffle runnable callbacks with it before each pass; None keeps asyncio's order, which is repeatable too.
    ``grace_s``: real seconds to wait for threads and sockets before each jump.
    """

    virtual = True
    """Tells a timer that never ends, such as a measurement of the loop's lag, to stay away."""

    def __init__(self, *, seed: int | None = None, grace_s: float = 0.0) -> None:
        self._jumping = _JumpingSelector(grace_s)
        super().__init__(self._jumping)
        self._random = None if seed is None else random.Random(seed)
        self._jumping.next_deadline = self._next_deadline

    def _next_deadline(self) -> float:
        deadline: float = self._scheduled[0].when()  # type: ignore[attr-defined]
        return deadline

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def _run_once(self) -> None:
        # Private to asyncio, as is _ready: tests/testing/test_clock.py notices if a new Python renames them.
        if self._random is not None:
            ready = self._ready  # type: ignore[attr-defined]
            shuffled = [ready.popleft() for _ in range(len(ready))]
            self._random.shuffle(shuffled)
            ready.extend(shuffled)
        super()._run_once()  # type: ignore[misc]


def run_virtual(function: Callable[..., Awaitable[T]], *args: Any, seed: int | None = None, grace_s: float = 0.0) -> T:
    """Run ``await function(*args)`` on a new virtual clock and return its result.

    Example::

        >>> async def nap() -> float:
        ...     await anyio.sleep(3600)
        ...     return anyio.current_time()
        >>> run_virtual(nap)
        3600.0
    """
    options = {"loop_factory": partial(VirtualClock, seed=seed, grace_s=grace_s)}
    return anyio.run(function, *args, backend="asyncio", backend_options=options)
