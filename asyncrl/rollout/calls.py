"""Calls into user code: where they run, how long they may take, and whose fault an error is.

Coroutine functions run on the event loop, plain functions in one of a bounded number of threads. A timeout or a lost
connection inside is the machinery's fault and becomes an ``InfrastructureError``; anything else is raised as it is.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import RunVar

from asyncrl.concurrency.endings import first_error
from asyncrl.concurrency.outside import waiting_outside
from asyncrl.concurrency.threads import DaemonThreads
from asyncrl.errors import AsyncRLError, InfrastructureError, RolloutTimeout
from asyncrl.rollout.usercode import UserTraceback, place_in_thread, place_of

__all__ = ["Deadline", "UserCalls", "blamed", "call_user", "in_thread", "of_loop", "time_of"]

T = TypeVar("T")

_USER_THREADS = 32
# Enough for functions that mostly wait; a thread that computes holds the interpreter, and more would not help.
_user_threads: RunVar[DaemonThreads] = RunVar("asyncrl.user_threads")
_abandoned: RunVar[list[_ThreadCall]] = RunVar("asyncrl.abandoned_calls")


def time_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """``loop.time``; of asyncio's own loops the system's clock itself, which takes half as long to read."""
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time


class Deadline:
    """Cancels its block after ``seconds`` and raises ``RolloutTimeout``, which names ``what``."""

    __slots__ = ("_scope", "_seconds", "_what")

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._seconds = seconds
        self._scope = anyio.CancelScope(deadline=asyncio.get_running_loop().time() + seconds)

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        handled = self._scope.__exit__(kind, error, traceback)
        if self._scope.cancelled_caught:
            raise _timeout(self._what, self._seconds, error)
        return handled


class UserCalls:
    """Makes the calls of a run's trajectories, each with a deadline of ``timeout`` seconds. A task makes one at a time.

    All have the same time, so they are due in the order in which they began, and one timer serves them all. The
    deadline cancels the task as ``asyncio.timeout`` does: a cancel scope and a timer for each call cost more than
    everything else that a turn needs. Leaving the block ends the timer.
    """

    __slots__ = ("_due", "_late", "_loop", "_now", "_timeout_s", "_timer")

    def __init__(self, timeout: float = math.inf) -> None:
        self._timeout_s = timeout
        self._loop = asyncio.get_running_loop()
        self._now = time_of(self._loop)
        self._timer: asyncio.TimerHandle | None = None
        self._due: dict[asyncio.Task[Any], float] = {}
        # Who makes a call -> loop time by which it has to end; earliest first.
        self._late: set[asyncio.Task[Any]] = set()
        # Those of them whose call was ended.

    def __enter__(self) -> UserCalls:
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``, a coroutine function or a plain one. Raises what ``call_user`` raises."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        cancelling = task.cancelling()
        failure: BaseException
        self._due[task] = due = self._now() + self._timeout_s
        if self._timer is None and due < math.inf:
            self._timer = self._loop.call_at(due, self._look)
        try:
            if _is_asynchronous(getattr(function, "__func__", function)):
                return await function(*args)
            return await in_thread(partial(function, *args), _name(function))
        except asyncio.CancelledError as error:
            # If somebody else cancelled the task as well, that counts for more.
            if task not in self._late or task.uncancel() > cancelling:
                raise
            failure = _timeout(_name(function), self._timeout_s, error)
        except Exception as error:  # noqa: BLE001  raised again below
            failure = blamed(_name(function), error)
        finally:
            del self._due[task]
            if self._late:
                self._late.discard(task)
        raise failure  # outside of the handler, so that it keeps its own cause

    def _look(self) -> None:
        """Cancel the tasks whose calls are late, and set the timer for the deadline that comes next."""
        self._timer = None
        now = self._now()
        for task, due in self._due.items():
            if due > now:
                self._timer = self._loop.call_at(due, self._look)
                return
            if task not in self._late:
                self._late.add(task)
                task.cancel()


async def call_user(function: Callable[..., Any], *args: Any, timeout: float = math.inf) -> Any:
    """Make one call. Raises ``RolloutTimeout`` after ``timeout`` seconds (a thread cannot be ended: it goes on until
    its function returns; ``in_process`` is for those that may not), ``InfrastructureError`` for a timeout or a lost
    connection inside, and whatever else the function raises.
    """
    with UserCalls(timeout) as calls:
        return await calls(function, *args)


async def in_thread(function: Callable[[], Any], name: str) -> Any:
    """Call a plain function in one of the threads for user code, and await what it returns if it is an awaitable.

    If the caller is cancelled it waits no longer; the thread goes on and is taken until its function returns. Raises
    ``InfrastructureError`` if that is the fate of all threads.
    """
    abandoned = _abandoned_calls()
    if len(abandoned) >= _USER_THREADS:
        counts = Counter(call.name for call in abandoned).most_common(3)
        names = ", ".join(f"{what} ({count})" for what, count in counts)
        raise InfrastructureError(
            f"{name} has no thread: all {_USER_THREADS} are held by calls that passed their deadlines and never "
            f"returned: {names}. Threads cannot be ended: write such functions with rl.in_process"
        )
    call = _ThreadCall(function, name)
    try:
        with waiting_outside():
            result = await _threads().call(call)
    except asyncio.CancelledError as error:
        if call.begun:
            error.__cause__ = UserTraceback(place_in_thread(call.thread), "")
            abandoned.append(call)
            call.abandon()
        raise
    return await result if inspect.isawaitable(result) else result


class _ThreadCall:
    """A function in a thread, of which the event loop can see whether it has begun and ended."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function = function
        self._is_abandoned = False
        self._result: Any = None
        self.name = name
        self.begun = False
        self.ended = False
        self.thread = 0
        """Which it is in."""

    def __call__(self) -> Any:
        self.thread = threading.get_ident()
        self.begun = True
        try:
            self._result = self._function()
            return self._result
        finally:
            self.ended = True
            self._discard()

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self._is_abandoned = True
        self._discard()

    def _discard(self) -> None:
        # By the thread and by the event loop: whoever comes second closes a coroutine that nobody will await.
        if self._is_abandoned and self.ended and inspect.iscoroutine(self._result):
            self._result.close()


_is_asynchronous = functools.lru_cache(maxsize=1024)(inspect.iscoroutinefunction)


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def _timeout(what: str, seconds: float, cancelled: BaseException | None) -> RolloutTimeout:
    """The error for a call that was ended by its deadline: it says where the user's code was then."""
    place = place_of(cancelled)
    failure = RolloutTimeout(f"{what} ran past its deadline of {seconds} s{place and f', at {place}'}")
    failure.__cause__ = UserTraceback(place, "") if place else None
    return failure


def blamed(what: str, error: Exception) -> BaseException:
    """The error to raise for ``error``: what the machinery did becomes an ``InfrastructureError``.

    User code may have task groups of its own; the first error in them counts.
    """
    first = first_error(error)
    if isinstance(first, AsyncRLError) or not isinstance(first, TimeoutError | ConnectionError):
        return first
    failure = InfrastructureError(f"{what}: {type(first).__name__}: {first}")
    failure.__cause__ = first
    return failure


def of_loop(variable: RunVar[T], make: Callable[[], T]) -> T:
    """The value of ``variable`` on this event loop, made when it is first asked for."""
    try:
        return variable.get()
    except LookupError:
        variable.set(value := make())
        return value


def _abandoned_calls() -> list[_ThreadCall]:
    """Calls of this event loop that nobody waits for any more, and that have not ended."""
    calls = of_loop(_abandoned, list[_ThreadCall])
    calls[:] = [call for call in calls if not call.ended]
    return calls


def _threads() -> DaemonThreads:
    """Those of this event loop."""
    return of_loop(_user_threads, lambda: DaemonThreads(_USER_THREADS))
