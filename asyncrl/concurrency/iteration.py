"""An async iterator whose work goes on between its items, in structured concurrency.

``async for step in trainer.run(..)`` must keep sampling while the caller looks at a step. A task group may not stay
open across a ``yield`` (the caller can leave the loop anywhere, and the scope would end in the wrong task), so the
work runs in a task of its own that the iterator starts, holds and ends: when the loop is left, by its end, ``break``,
an error or cancellation, the task is cancelled and waited for. This is the only task in asyncrl that no task group
starts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncrl.concurrency.endings import first_error, is_cancellation, note

__all__ = ["Consumer", "iterate"]

T = TypeVar("T")


class Consumer(Generic[T]):
    """The producer's view of the loop that it feeds.

    A caller that leaves cancels the producer and then closes the streams. On a closed stream the methods wait for
    that cancellation, which is on its way.
    """

    def __init__(self, asked: MemoryObjectReceiveStream[None], given: MemoryObjectSendStream[T]) -> None:
        self._asked = asked
        self._given = given

    async def wanted(self) -> None:
        """Wait until the caller is back for the next item."""
        try:
            await self._asked.receive()
        except anyio.EndOfStream:
            await anyio.sleep_forever()

    async def give(self, item: T) -> None:
        """Hand the item over."""
        try:
            await self._given.send(item)
        except anyio.BrokenResourceError:
            await anyio.sleep_forever()


def iterate(producer: Callable[[Consumer[T]], Awaitable[None]]) -> AsyncGenerator[T, None]:
    """Run ``producer`` beside the caller and yield what it gives, until it returns.

    An error in it, or in any task under it, is raised here: the first one, not a group. That is also so when the
    caller leaves its loop early, where the error is raised by ``aclose``, for example of ``contextlib.aclosing``. If an
    error of the caller's own made it leave, that one came first unless the work had failed before, and the other is a
    note on it. After a mere ``break`` nobody waits for the end of the work, and asyncio logs its error.
    """
    return _Iteration(producer)


class _Iteration(AsyncGenerator[T, None]):
    """The generator, with an ``aclose`` that knows for which error it is called."""

    def __init__(self, producer: Callable[[Consumer[T]], Awaitable[None]]) -> None:
        self._around = sys.exception()
        # The caller may be in an ``except`` block, whose error has nothing to do with its loop.
        self._leaving = _Leaving()
        self._items = _items(producer, self._leaving)

    def __aiter__(self) -> AsyncGenerator[T, None]:
        return self

    async def __anext__(self) -> T:
        return await anext(self._items)

    async def asend(self, value: None) -> T:
        """The next item; ``value`` is not used."""
        return await self._items.asend(value)

    async def athrow(self, *error: Any) -> T:
        """Throw into the loop, which ends the work."""
        return await self._items.athrow(*error)

    async def aclose(self) -> None:
        """End the work, wait for that, and raise its error if there is one."""
        error = sys.exception()
        self._leaving.error = None if error is self._around else error
        await self._items.aclose()


@dataclass(slots=True)
class _Leaving:
    """How the caller leaves its loop."""

    error: BaseException | None = None
    """Its own, if it has one."""


class _Work:
    """The producer's run, and how it ended."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.error: BaseException | None = None

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Await ``work()`` and take its error."""
        try:
            with self.scope:
                await work()
        except BaseException as error:
            self.error = error
            if is_cancellation(error):
                raise
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # By the end of the event loop, after which nobody asks.
                message = "what a loop had left running failed while it ended"
                told = {"message": message, "exception": first_error(error), "task": task}
                asyncio.get_running_loop().call_exception_handler(told)
        finally:
            self.ended.set()

    def raise_first(self, left_for: BaseException | None, *, had_ended: bool) -> None:
        """Raise the error, unless the caller leaves for one that came before."""
        if self.error is None or is_cancellation(self.error):
            return
        error = first_error(self.error)
        if left_for is not None and left_for is not error and not is_cancellation(left_for):
            if not had_ended:
                note(left_for, error)
                return
            note(error, left_for)
        raise error


async def _items(producer: Callable[[Consumer[T]], Awaitable[None]], leaving: _Leaving) -> AsyncGenerator[T, None]:
    # Each stream holds at most the one message that the other side is waiting for.
    ask, asked = anyio.create_memory_object_stream[None](1)
    given, receive = anyio.create_memory_object_stream[T](1)

    async def produce() -> None:
        with asked, given:
            await producer(Consumer(asked, given))

    work = _Work()
    task = asyncio.get_running_loop().create_task(work.run(produce))  # held, and waited for below
    try:
        while True:
            try:
                ask.send_nowait(None)
                item = await receive.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                break
            yield item
    finally:
        had_ended = work.ended.is_set()
        work.scope.cancel()
        ask.close()
        receive.close()
        with anyio.CancelScope(shield=True):
            await work.ended.wait()
        del task
        work.raise_first(leaving.error, had_ended=had_ended)
