"""``rl.run``: training from a script, with everything around it that a person wants."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from asyncrl.checkpoint.folders import new_folder
from asyncrl.checkpoint.options import Checkpointing
from asyncrl.errors import ConfigError, require_choice
from asyncrl.observe.console import Reporting, say
from asyncrl.training.attended import OnStep, RunCall, RunEnd, attend
from asyncrl.training.trainer import AsyncTrainer
from asyncrl.types import Row, Step

__all__ = ["RunHost", "host", "keep_in", "run"]

RunHost: TypeAlias = Callable[[RunCall, Path | None], RunEnd]
"""Makes the run that a script asks for, in the folder that the script names (None: it names none)."""
host: ContextVar[RunHost] = ContextVar("host")
"""Set by a command that runs a script: it decides about the folder, and reports."""


def run(
    trainer: AsyncTrainer,
    rows: Sequence[Row],
    *,
    steps: int,
    on_step: OnStep | None = None,
    run_dir: Path | str | None = None,
    keep: bool = True,
    log: Reporting = "console",
) -> list[Step]:
    """Run ``trainer`` to the end from code that has no event loop, and return its steps.

    ``on_step`` is called with each step; it is awaited if it is a coroutine function and runs in a worker thread if it
    is not. Its step has the batch's ``trajectories``; the steps that are returned do not.
    ``run_dir``: the folder that the run is kept in: state, metrics, events, rollouts. One that has a run goes on with
    it. None: that of ``trainer.checkpointing``, or else a new folder in ``runs``.
    ``keep``: False keeps nothing.
    ``log``: lines for people on stderr (``console``, on a terminal with a live line), lines of JSON (``json``), or
    ``none``.

    The first SIGINT (Ctrl-C) or SIGTERM stops the run in order and ends the program with exit code 0. Raises
    ``ConfigError`` where an event loop is running, as in a notebook, and whatever ends the run.
    """
    if _loop_is_running():
        raise ConfigError(
            "rl.run starts an event loop, and here one is running already (as in a notebook, or in a coroutine): write "
            "`async for step in trainer.run(rows, steps=..)`"
        )
    require_choice("log", log, Reporting)
    call = RunCall(trainer=trainer, rows=rows, steps=steps, on_step=on_step, log=log)
    end = host.get(_host_of(keep))(call, _folder(trainer, run_dir, keep))
    if end.stopped:
        raise SystemExit(0)
    return list(end.steps)


def keep_in(call: RunCall, directory: Path) -> RunCall:
    """``call`` with the state of the run kept in ``directory``."""
    saves = call.trainer.checkpointing
    moved = Checkpointing(directory) if saves is None else replace(saves, run_dir=directory)
    return replace(call, trainer=replace(call.trainer, checkpointing=moved))


def _host_of(keep: bool) -> RunHost:
    """The script itself."""

    def attended(call: RunCall, directory: Path | None) -> RunEnd:
        script = _script()
        if not keep:
            _say(call, "nothing of this run is kept (keep=False)")
            return attend(call, directory=None, configuration={})
        directory = directory or new_folder(Path("runs"), script.stem if script else "run")
        _say(call, f"the run is kept in {directory}")
        end = attend(keep_in(call, directory), directory=directory, configuration={}, origin=script)
        if end.stopped:
            _say(call, f"stopped; it goes on with rl.run(.., run_dir={str(directory)!r})")
        return end

    return attended


def _say(call: RunCall, text: str) -> None:
    if call.log == "console":
        say(text)


def _folder(trainer: AsyncTrainer, run_dir: Path | str | None, keep: bool) -> Path | None:
    """Where the script wants its run to be kept."""
    own = None if trainer.checkpointing is None else trainer.checkpointing.directory
    wanted = None if run_dir is None else Path(run_dir)
    if not keep and (own or wanted):
        raise ConfigError(
            f"keep is False, and run_dir or checkpointing keeps the run in {wanted or own}: use one of both"
        )
    if own is not None and wanted is not None and own != wanted:
        raise ConfigError(f"run_dir is {str(wanted)!r}, but trainer.checkpointing keeps the run in {str(own)!r}")
    return wanted or own


def _script() -> Path | None:
    """The program's own file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else Path(file).resolve()


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
