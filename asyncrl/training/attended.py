"""A run with everything around it that a person wants: files in its folder, lines on stderr, an end at a signal.

Recipes and scripts run in the same way: ``RunCall`` is what ``rl.run`` was called with, or what a recipe says.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import anyio
import anyio.to_thread

from asyncrl.checkpoint.directory import write_configuration
from asyncrl.checkpoint.folders import has_run, make_folder
from asyncrl.concurrency.endings import FirstError
from asyncrl.events import Events, Notice, RunEnded
from asyncrl.observe.console import Reporting, reporting, until_signal
from asyncrl.observe.kept import KeptRollouts
from asyncrl.observe.rollouts import write_rollouts
from asyncrl.observe.sinks import read_results, write_events
from asyncrl.observe.summary import RunSummary
from asyncrl.plain import error_text
from asyncrl.rollout.usercode import place_of
from asyncrl.training.trainer import AsyncTrainer
from asyncrl.types import Row, Step

__all__ = ["OnStep", "RunCall", "RunEnd", "attend"]

OnStep: TypeAlias = Callable[[Step], Awaitable[None]] | Callable[[Step], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCall:
    """A run that is to be made."""

    trainer: AsyncTrainer
    rows: Sequence[Row]
    steps: int
    on_step: OnStep | None = None
    log: Reporting = "console"
    rollouts: KeptRollouts = field(default_factory=KeptRollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended that did not fail."""

    steps: Sequence[Step]
    """Those of this process, without their trajectories: a long run would keep all of them in memory."""
    stopped: bool
    """By a signal."""
    summary: Mapping[str, object]


def attend(
    call: RunCall,
    *,
    directory: Path | None,
    configuration: Mapping[str, object],
    origin: Path | None = None,
    overrides: Sequence[str] = (),
    debug: bool = False,
    secrets: Sequence[str] = (),
) -> RunEnd:
    """Make the run. ``directory`` gets its files, None: nothing is kept. One that has a run is resumed.

    ``configuration``, ``origin``, ``overrides``: what ``run.json`` of a new folder says of it, of the recipe or script
    that it is from, and of what was changed in that. Raises whatever ends the run, ``ConfigError`` before
    anything starts.
    """
    events, summary = call.trainer.events, RunSummary()
    earlier = []
    if directory is not None and has_run(directory):
        earlier = list(read_results(directory))
    elif directory is not None:
        make_folder(directory, "run_dir")
        write_configuration(directory, configuration, origin=origin, overrides=overrides)
    done: list[Step] = []

    async def work() -> None:
        await _take_steps(call, directory, done)

    async def main() -> bool:
        saves = call.trainer.checkpointing
        own = saves is not None and saves.on_signal
        if own or threading.current_thread() is not threading.main_thread():
            await work()
            return False
        return await until_signal(work)

    with contextlib.ExitStack() as stack:
        stack.callback(events.subscribe(summary.observe))
        stack.enter_context(reporting(events, steps=call.steps, style=call.log, debug=debug, secrets=secrets))
        for event in earlier:
            if isinstance(event, Notice):
                events.emit(event)
            else:
                summary.observe(event)
        with FirstError().raised():
            stopped = anyio.run(main, backend="asyncio")
    return RunEnd(steps=done, stopped=stopped, summary=summary.summary())


async def _take_steps(call: RunCall, directory: Path | None, done: list[Step]) -> None:
    """Take the run's steps, with everything in ``directory`` that is written beside them."""
    steps = call.trainer.run(call.rows, steps=call.steps)
    async with contextlib.AsyncExitStack() as stack:
        if directory is not None:
            await stack.enter_async_context(write_events(directory, call.trainer.events))
            await stack.enter_async_context(write_rollouts(directory, call.trainer.events, call.rollouts))
        stack.enter_context(_telling_the_end(call.trainer.events))
        await stack.enter_async_context(contextlib.aclosing(steps))
        async for step in steps:
            await _tell(call.on_step, step)
            done.append(replace(step, trajectories=()))


@contextlib.contextmanager
def _telling_the_end(events: Events) -> Iterator[None]:
    """An event says how the block ended, for those who read the run's files."""
    try:
        yield
    except BaseException as raised:
        error = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        stopped = isinstance(error, anyio.get_cancelled_exc_class() | KeyboardInterrupt)
        text, where = ("", "") if stopped else (error_text(error), place_of(error))
        _end(events, "stopped" if stopped else "failed", text, where)
        raise
    _end(events, "finished")


def _end(events: Events, reason: str, error: str = "", where: str = "") -> None:
    events.emit(RunEnded(time=anyio.current_time(), reason=reason, error=error, where=where))


async def _tell(on_step: OnStep | None, step: Step) -> None:
    if on_step is None:
        return
    if inspect.iscoroutinefunction(on_step):
        await on_step(step)
    else:
        await anyio.to_thread.run_sync(on_step, step)
