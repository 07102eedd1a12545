"""Training from code that has no event loop."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.to_thread

from asyncrl.trainer import AsyncTrainer
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

    ``on_step`` is awaited if it is a coroutine function and runs in a worker thread if it is not.
    """

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
