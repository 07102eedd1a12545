"""Threads for functions that may never return, such as a user's: none of them keeps the process from ending.

Python waits at exit for the threads of anyio and asyncio. These here are daemons, which it leaves behind. A thread is
started when all others are at work, serves one call after the other, and ends when it has had none for some seconds.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

import anyio

__all__ = ["DaemonThreads"]

T = TypeVar("T")
_IDLE_S = 10.0
_Calls: TypeAlias = "SimpleQueue[_Call]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    function: Callable[[], Any]
    context: Context
    answer: asyncio.Future[Any]

    def made(self) -> tuple[object, BaseException | None]:
        """The result, or what was raised. Nothing is called if nobody waits any more."""
        if self.answer.cancelled():
            return None, None
        try:
            return self.context.run(self.function), None
        except BaseException as error:  # noqa: BLE001  raised where it is awaited
            return None, error


class DaemonThreads:
    """The threads of one event loop. At most ``most`` calls are waited for at a time; others wait for their turn."""

    def __init__(self, most: int) -> None:
        self._limiter = anyio.CapacityLimiter(most)
        self._idle: list[_Calls] = []
        # Where each idle thread looks for its next call. A thread that ends takes its own out.

    async def call(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises. A caller that is cancelled waits no longer, and the thread goes on."""
        async with self._limiter:
            answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            context = copy_context()
            if (sniffio := sys.modules.get("sniffio")) is not None:
                context.run(sniffio.current_async_library_cvar.set, None)  # so that ``function`` may run a loop itself
            calls = self._idle.pop() if self._idle else self._started()
            calls.put(_Call(function=function, context=context, answer=answer))
            return await answer

    def statistics(self) -> anyio.CapacityLimiterStatistics:
        """How many calls are waited for, and how many wait for their turn."""
        return self._limiter.statistics()

    def _started(self) -> _Calls:
        calls: _Calls = SimpleQueue()
        threading.Thread(target=self._serve, args=(calls,), name="asyncrl user code", daemon=True).start()
        return calls

    def _serve(self, calls: _Calls) -> None:
        while True:
            try:
                call = calls.get(timeout=_IDLE_S)
            except Empty:
                try:
                    self._idle.remove(calls)
                except ValueError:
                    continue  # it has just been taken: there will be a call
                return
            outcome = call.made()
            self._idle.append(calls)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                call.answer.get_loop().call_soon_threadsafe(_settle, call.answer, *outcome)
            del call, outcome  # an idle thread keeps nothing alive


def _settle(answer: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if answer.cancelled():
        return
    if isinstance(error, StopIteration):  # which a future cannot have
        stopped = RuntimeError("the function raised StopIteration")
        stopped.__cause__ = error
        error = stopped
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
