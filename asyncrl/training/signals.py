"""Stopping a run in order when the system asks for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskStatus

from asyncrl.errors import ConfigError
from asyncrl.events import Events, Notice

__all__ = ["stopped_by"]


@asynccontextmanager
async def stopped_by(signals: Sequence[signal.Signals], events: Events) -> AsyncGenerator[None, None]:
    """The first of ``signals`` cancels the block, which then ends like any other; the second ends the process.

    Raises ``ConfigError`` in a thread that no signal reaches.
    """
    if not signals:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError.for_value(
            "checkpointing.on_signal",
            tuple(number.name for number in signals),
            "() outside of the main thread, which is the only one that gets signals: run there, or stop by cancelling",
        )
    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        await tasks.start(_watch, signals, scope, events)
        with scope:
            yield
        tasks.cancel_scope.cancel()


async def _watch(
    signals: Sequence[signal.Signals],
    scope: anyio.CancelScope,
    events: Events,
    *,
    task_status: TaskStatus[None],
) -> None:
    with anyio.open_signal_receiver(*signals) as received:
        task_status.started()
        async for number in received:
            if scope.cancel_called:
                # At once: the save may be what hangs. What was committed is on disk.
                os._exit(128 + number)
            events.emit(Notice(time=anyio.current_time(), name="stopping", keys={"signal": number.name}))
            scope.cancel()
