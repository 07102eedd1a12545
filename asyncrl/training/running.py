"""Training from code that has no event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.to_thread

from asyncrl.errors import ConfigError
from asyncrl.training.trainer import AsyncTrainer
from asyncrl.types import Row, Step

__all__ = ["run"]


def run(
    trainer: AsyncTrainer,
    rows: Sequence[Row],
    *,
    steps: int,
    on_step: Callable[[Step], Awaitable[None]] | Callable[[Step], None] | None = None,
) -> list[Step]:
    """Run ``trainer`` to the end from code that has no event loop, and return its steps.

    ``on_step`` is awaited if it is a coroutine function and runs in a worker thread if it is not. Raises
    ``ConfigError`` where an event loop is running, as in a notebook.
    """
    if _loop_is_running():
        raise ConfigError(
            "rl.run starts an event loop, and here one is running already (as in a notebook, or in a coroutine): write "
            "`async for step in trainer.run(rows, steps=..)`"
        )

    async def main() -> list[Step]:
        steps_done = []
        async with contextlib.aclosing(trainer.run(rows, steps=steps)) as run:
            async for step in run:
                steps_done.append(step)
                if on_step is None:
                    continue
                if inspect.iscoroutinefunction(on_step):
                    await on_step(step)
                else:
                    await anyio.to_thread.run_sync(on_step, step)
        return steps_done

    return anyio.run(main)


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
