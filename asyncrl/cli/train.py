"""``asyncrl train`` and ``asyncrl demo``: a recipe into a run directory."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from asyncrl.cli.common import Commands, add_overrides, load, print_result, reporting, until_signal
from asyncrl.errors import ConfigError
from asyncrl.plain import shown

if TYPE_CHECKING:
    from asyncrl.events import Event
    from asyncrl.recipe.compose import ComposedRun
    from asyncrl.recipe.config import Recipe

__all__ = ["add"]

_RUN_FILES = ("run.json", "metrics.jsonl", "events.jsonl", "state", "weights", "journal")


def add(commands: Commands) -> None:
    """Declare the commands and their flags."""
    train = commands.add("train", _train, "train a recipe")
    train.add_argument("recipe", type=Path, help="TOML file; paths in it are relative to it")
    demo = commands.add("demo", _train, "train the guess-a-number recipe, on any machine in about two minutes")
    demo.set_defaults(recipe=None)
    for command in (train, demo):
        add_overrides(command)
        folder = command.add_mutually_exclusive_group()
        folder.add_argument(
            "--run-dir", type=Path, metavar="DIR", help="folder for the run's files (default: a new one)"
        )
        folder.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in that folder")


def _train(arguments: argparse.Namespace) -> None:
    from asyncrl.checkpoint.directory import write_configuration
    from asyncrl.events import Notice
    from asyncrl.observe.sinks import read_results
    from asyncrl.observe.summary import RunSummary
    from asyncrl.recipe.compose import compose

    started = time.monotonic()
    recipe = load(arguments)
    directory = _run_directory(recipe, arguments.run_dir, arguments.resume)
    composed = compose(recipe, directory=directory)
    summary = RunSummary()
    earlier: list[Event] = []
    if arguments.resume is None:
        _make_directory(directory)
        write_configuration(directory, recipe.tables)
    else:
        earlier = list(read_results(directory))

    async def work() -> None:
        await _run_steps(composed, directory)

    events = composed.trainer.events
    events.subscribe(summary.observe)
    with reporting(arguments, recipe, events, steps=composed.steps):
        for event in earlier:
            if isinstance(event, Notice):
                events.emit(event)
            else:
                summary.observe(event)
        stopped = anyio.run(until_signal, work, backend="asyncio")
    print_result({**summary.summary(), "run_dir": str(directory)}, started, stopped)


async def _run_steps(composed: ComposedRun, directory: Path) -> None:
    from asyncrl.observe.sinks import write_events

    steps = composed.trainer.run(composed.rows, steps=composed.steps)
    async with write_events(directory, composed.trainer.events), contextlib.aclosing(steps):
        async for _ in steps:
            pass


def _run_directory(recipe: Recipe, chosen: Path | None, resume: Path | None) -> Path:
    if resume is not None:
        if recipe.checkpointing is None:
            raise ConfigError.for_value("checkpoint.enabled", False, "true to resume a run")
        if not os.path.lexists(resume / _RUN_FILES[0]):
            raise ConfigError.for_value("--resume", str(resume), "the folder of a run (there is no run.json in it)")
        return resume
    if chosen is None:
        name = f"{recipe.path.resolve().parent.name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        return Path(recipe.run.directory) / name
    if "\0" in str(chosen):
        raise ConfigError.for_value("--run-dir", str(chosen), "a folder that can be made")
    found = [name for name in _RUN_FILES if os.path.lexists(chosen / name)]
    if found:
        hint = f"go on with that one by --resume {chosen}, or " if found[0] == _RUN_FILES[0] else ""
        raise ConfigError(
            f"--run-dir is {shown(str(chosen))}, which has the files of another run ({', '.join(found)}): {hint}use "
            "another folder"
        )
    return chosen


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError.for_value("--run-dir", str(directory), f"a folder that can be made: {error}") from error
