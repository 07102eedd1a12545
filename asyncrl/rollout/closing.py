"""Closing environments: ``close()`` is always called, and never keeps a trajectory or the end of a run for long.

After ``CLOSE_S`` seconds a ``close()`` is cancelled, also within a scope that it shields. One that goes on all the same
is left where it is a second later: its coroutine is not resumed any more, and a thread is left behind. Each call of a
plain ``close()`` has a thread of its own, which does not keep the process from ending, so that those that hang take
nothing from the others. How a ``close()`` ended changes nothing about its trajectory. It is counted, and each kind of
mishap is told when it has happened once, ten times, a hundred times, and so on.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import anyio

from asyncrl.concurrency.outside import waiting_outside
from asyncrl.errors import InfrastructureError, RolloutTimeout
from asyncrl.events import Events, Notice
from asyncrl.plain import error_text
from asyncrl.rollout.env import Env
from asyncrl.rollout.usercode import place_of

__all__ = ["CLOSE_S", "Closing"]

CLOSE_S = 10.0
_GRACE_S = 1.0
# For a close() that was cancelled to give back what it holds.
_THREADS = 1024
# Left behind by calls that never return. A process has some thousands, and other things to do with them.


class Closing:
    """Owns the count of environments that could not be closed."""

    def __init__(self) -> None:
        self._mishaps: Counter[tuple[str, str]] = Counter()
        self._threads: list[threading.Thread] = []
        # In which a close() runs.

    async def close(self, env: Env, trajectory: str, events: Events) -> None:
        """Call ``env.close``. Takes eleven seconds at most, also if it is cancelled; raises nothing of the user's."""
        try:
            with anyio.CancelScope(shield=True):
                await self._bounded(env.close)
        except Exception as raised:  # noqa: BLE001  user code may raise anything
            self._tell(env, trajectory, raised, events)

    def _tell(self, env: Env, trajectory: str, error: Exception, events: Events) -> None:
        kind = type(env).__name__, type(error).__name__
        self._mishaps[kind] += 1
        times = self._mishaps[kind]
        if times != 10 ** round(math.log10(times)):
            return
        keys: dict[str, object] = {
            "trajectory": trajectory,
            "environment": kind[0],
            "error": error_text(error),
            "where": place_of(error),
            "times": times,
        }
        now = anyio.current_time()
        events.emit(Notice(time=now, name="environment_not_closed", level="warning", keys=keys))

    async def _bounded(self, function: Callable[[], Awaitable[None]]) -> None:
        if inspect.iscoroutinefunction(function):
            await self._within(function())
        else:
            made = await self._in_thread(function)
            if inspect.isawaitable(made):
                await self._within(_awaited(made))

    async def _within(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Drive ``coroutine`` in a task of its own: if it is left in the middle, so are its scopes."""
        call = _BoundedClose(coroutine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call.run)
        if call.error is not None:
            raise call.error

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= _THREADS:
            raise InfrastructureError(f"no thread is left for close(): {_THREADS} of them have not returned")
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()
        thread = threading.Thread(target=_work, args=(function, outcome), name="asyncrl close", daemon=True)
        self._threads.append(thread)
        thread.start()
        with anyio.move_on_after(CLOSE_S), waiting_outside():
            return await asyncio.wrap_future(outcome)
        raise _late()


def _work(function: Callable[[], Any], outcome: Future[Any]) -> None:
    try:
        outcome.set_result(function())
    except Exception as error:  # noqa: BLE001  raised where it is awaited
        outcome.set_exception(error)


class _BoundedClose:
    """Runs a coroutine that is cancelled after ``CLOSE_S``, and dropped ``_GRACE_S`` later."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._is_late = False
        self._is_dropped = False
        self.error: Exception | None = None

    async def run(self) -> None:
        """Run the coroutine until it ends or is dropped; what it raises is ``error`` afterwards."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        timers = [
            loop.call_later(CLOSE_S, functools.partial(self._cancel, task, drop=False)),
            loop.call_later(CLOSE_S + _GRACE_S, functools.partial(self._cancel, task, drop=True)),
        ]
        try:
            await self
        except asyncio.CancelledError:
            # As a scope does it: the cancellation was ours, and ends here.
            if not self._is_late:
                raise
        except Exception as error:  # noqa: BLE001  raised by the one who waits
            self.error = error
        finally:
            for timer in timers:
                timer.cancel()
        if self._is_late:
            while task.uncancel():
                pass
            self.error = _late()

    def _cancel(self, task: asyncio.Task[Any], *, drop: bool) -> None:
        self._is_late, self._is_dropped = True, drop
        task.cancel()  # unlike the cancellation of a scope it reaches into one that is shielded

    def __await__(self) -> Generator[Any, Any, None]:
        """Drive the coroutine as ``await`` does, until it is dropped."""
        resume = functools.partial(self._coroutine.send, None)
        while True:
            try:
                waited = resume()
            except StopIteration:
                return
            try:
                yield waited
            except BaseException as error:
                if self._is_dropped:
                    with suppress(Exception):  # it may fail in this, or ignore it; Python will complain of that
                        self._coroutine.close()
                    raise
                resume = functools.partial(self._coroutine.throw, error)
            else:
                resume = functools.partial(self._coroutine.send, None)


async def _awaited(made: Awaitable[Any]) -> None:
    await made


def _late() -> RolloutTimeout:
    return RolloutTimeout(f"close() ran past its deadline of {CLOSE_S} s")
