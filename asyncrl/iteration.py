"""An async iterator whose work goes on between its items, in structured concurrency.

``async for step in trainer.run(..)`` must keep sampling while the caller looks at a step. A task group may not stay
open across a ``yield`` (the caller can leave the loop anywhere, and the scope would end in the wrong task), so the
work runs in a task of its own that the iterator starts, holds and ends: when the loop is left, by its end, ``break``,
an error or cancellation, the task is cancelled and waited for. This is the only task in asyncrl that no task group
starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

__all__ = ["Consumer", "first_error", "iterate"]

T = TypeVar("T")


class Consumer(Generic[T]):
    """The producer's view of the loop that it feeds."""

    def __init__(self, asked: MemoryObjectReceiveStream[None], given: MemoryObjectSendStream[T]) -> None:
        self._asked = asked
        self._given = given

    async def wanted(self) -> None:
        """Wait until the caller is back for the next item."""
        await self._asked.receive()

    async def give(self, item: T) -> None:
        """Hand the item over."""
        await self._given.send(item)


async def iterate(producer: Callable[[Consumer[T]], Awaitable[None]]) -> AsyncGenerator[T, None]:
    """Run ``producer`` beside the caller and yield what it gives, until it returns.

    An error in it, or in any task under it, is raised here: the first one, not a group.
    """
    # Each stream holds at most the one message that the other side is waiting for.
    ask, asked = anyio.create_memory_object_stream[None](1)
    given, receive = anyio.create_memory_object_stream[T](1)
    scope = anyio.CancelScope()
    ended = anyio.Event()
    errors: list[BaseException] = []

    async def host() -> None:
        try:
            with scope, asked, given:
                await producer(Consumer(asked, given))
        except BaseException as error:
            errors.append(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            ended.set()

    task = asyncio.get_running_loop().create_task(host())  # held, and waited for below
    try:
        while True:
            try:
                ask.send_nowait(None)
                item = await receive.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                break
            yield item
    finally:
        scope.cancel()
        ask.close()
        receive.close()
        with anyio.CancelScope(shield=True):
            await ended.wait()
        del task
    if errors:
        raise first_error(errors[0])


def first_error(error: BaseException) -> BaseException:
    """The first leaf of a (nested) exception group; the others stay visible as notes."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(inner) for inner in error.exceptions]
    first = leaves[0]
    for other in leaves[1:]:
        first.add_note(f"and also {type(other).__name__}: {other}")
    return first
