"""Stopping in order when the system asks for it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskStatus

__all__ = ["cancelled_by"]


@asynccontextmanager
async def cancelled_by(
    signals: Sequence[signal.Signals],
    *,
    on_first: Callable[[signal.Signals], None],
    on_second: Callable[[], None] = lambda: None,
) -> AsyncGenerator[anyio.CancelScope, None]:
    """The first of ``signals`` cancels the block, which then ends like any other; the second exits the process.

    ``on_first`` and ``on_second`` are called before that, to say it. Yields the scope that is cancelled. Enter it in
    the main thread, which is the only one that gets signals; without ``signals`` any thread will do.
    """
    scope = anyio.CancelScope()
    if not signals:
        yield scope
        return

    async def watch(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*signals) as received:
            task_status.started()
            async for number in received:
                if scope.cancel_called:
                    # At once: what the first one asked to stop may be what hangs.
                    on_second()
                    os._exit(128 + number)
                on_first(number)
                scope.cancel()

    async with anyio.create_task_group() as tasks:
        await tasks.start(watch)
        with scope:
            yield scope
        tasks.cancel_scope.cancel()
