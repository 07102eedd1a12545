"""A virtual clock: an event loop whose time passes at once, in an order that a seed decides.

``VirtualClock`` is asyncio's selector loop with two changes. Its ``time()`` is a number, and where the real loop
would sleep until the next deadline it adds the waiting time to that number instead. An hour of timeouts and sleeps
passes in milliseconds, deadlines are exact, and every anyio primitive works unchanged. With a ``seed`` the ready
queue is shuffled before each pass, so that one test explores many task orders and each of them can be repeated.

If every task is blocked and no deadline is pending, the loop raises ``Deadlock``: a hang becomes a failing test.

Time stands still while a thread or a process is at work that a task waits for, so a blocking tool takes no virtual
time. What never returns is waited for ``grace_s`` real seconds; then the clock goes on, and its deadline passes. The
clock knows of calls into user code, ``in_process``, ``asyncio.to_thread`` and anyio's threads under their default
limiter. It does not know of sockets: one in flight lets it jump, so such a test uses a fake.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from asyncrl.concurrency.outside import waiting_outside

__all__ = ["GRACE_S", "Deadlock", "VirtualClock", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
GRACE_S = 120.0
"""Longer than what tests do in threads, such as loading a tokenizer on a machine with other work."""
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
        self.is_busy_outside: Callable[[], bool] = lambda: False
        self._grace_s = grace_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        busy = self.is_busy_outside()
        if busy and (ready := super().select(self._grace_s)):
            return ready
        if timeout is None:
            beside = f", but for threads that have not returned in {self._grace_s} real seconds" if busy else ""
            raise Deadlock(f"at {self.now} s every task is blocked and no deadline is pending{beside}")
        # The deadline itself and not now + timeout, which may miss it by one rounding.
        self.now = self.next_deadline() if timeout < _LONGEST_SELECT_S else self.now + timeout
        return ready


class VirtualClock(asyncio.SelectorEventLoop):
    """The loop. Use it as ``loop_factory``, or through ``run_virtual``.

    ``seed``: shuffle runnable callbacks with it before each pass; None keeps asyncio's order, which is repeatable too.
    ``grace_s``: real seconds to wait, before a jump, for threads and processes that are at work.
    """

    virtual = True
    """Tells a timer that never ends, such as a measurement of the loop's lag, to stay away."""

    def __init__(self, *, seed: int | None = None, grace_s: float = GRACE_S) -> None:
        self._jumping = _JumpingSelector(grace_s)
        super().__init__(self._jumping)
        self._random = None if seed is None else random.Random(seed)
        self._jumping.next_deadline = self._next_deadline
        self._jumping.is_busy_outside = self._is_busy_outside
        self._limiter: anyio.CapacityLimiter | None = None
        self.outside = 0
        """Waits for threads and processes that have not ended, as far as they were said to it."""

    def _next_deadline(self) -> float:
        deadline: float = self._scheduled[0].when()  # type: ignore[attr-defined]
        return deadline

    def _is_busy_outside(self) -> bool:
        if self._limiter is None:
            self._limiter = anyio.to_thread.current_default_thread_limiter()  # there is one only while the loop runs
        return self.outside > 0 or self._limiter.borrowed_tokens > 0

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Count the call, which asyncio's own ``to_thread`` is made of too, until it has ended."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self.outside += 1
        future.add_done_callback(self._back_inside)
        return future

    async def shutdown_default_executor(self, *timeout: float | None) -> None:
        """Wait for its threads, as asyncio's runner does in the end."""
        with waiting_outside():
            await super().shutdown_default_executor(*timeout)

    def _back_inside(self, future: asyncio.Future[Any]) -> None:
        self.outside -= 1

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


def run_virtual(
    function: Callable[..., Awaitable[T]], *args: Any, seed: int | None = None, grace_s: float = GRACE_S
) -> T:
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
