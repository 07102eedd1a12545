"""``asyncrl train`` and ``asyncrl demo``: a recipe or a script into a run directory."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from asyncrl.checkpoint.folders import make_folder, new_folder, require_run, require_unused
from asyncrl.cli.common import Commands, add_overrides, load, noting_begin, print_result
from asyncrl.errors import ConfigError
from asyncrl.observe.console import say

if TYPE_CHECKING:
    from asyncrl.training.attended import RunCall, RunEnd

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the commands and their flags."""
    train = commands.add("train", _train, "train a recipe, or a script that calls rl.run")
    train.add_argument("recipe", type=Path, help="TOML file, paths in it are relative to it; or a Python file")
    demo = commands.add("demo", _train, "train the guess-a-number recipe, on any machine in about two minutes")
    demo.set_defaults(recipe=None)
    for command in (train, demo):
        add_overrides(command)
        command.add_argument(
            "--from",
            dest="start",
            type=Path,
            metavar="RUN|WEIGHTS",
            help="start from what a run has trained, or from the folder of an adapter or a model",
        )
        command.add_argument("--version", type=int, metavar="N", help="of the run to start from (default: the newest)")
        folder = command.add_mutually_exclusive_group()
        folder.add_argument(
            "--run-dir", type=Path, metavar="DIR", help="folder for the run's files (default: a new one)"
        )
        folder.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in that folder")


def _train(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.scripts import is_script

    started = time.monotonic()
    run = _train_script if is_script(arguments.recipe) else _train_recipe
    end, directory = run(arguments)
    print_result({**end.summary, "run_dir": str(directory)}, started, end.stopped)


def _train_recipe(arguments: argparse.Namespace) -> tuple[RunEnd, Path]:
    from asyncrl.recipe.checking import check_start
    from asyncrl.recipe.compose import compose
    from asyncrl.recipe.config import load_recipe
    from asyncrl.training.attended import RunCall, attend

    recipe = load(arguments)
    if arguments.resume is not None and recipe.checkpointing is None:
        raise ConfigError.for_value("checkpoint.enabled", False, "true to resume a run")
    directory = _folder(arguments) or new_folder(Path(recipe.run.directory), recipe.path.resolve().parent.name)
    if start := _start(arguments, directory):
        recipe = load_recipe(recipe.path, [*arguments.overrides, *start])
    composed = compose(recipe, directory=directory)
    anyio.run(check_start, recipe, composed, backend="asyncio")
    make_folder(directory, "--run-dir")
    call = RunCall(
        trainer=composed.trainer,
        rows=composed.rows,
        steps=composed.steps,
        log=recipe.run.log,
        rollouts=recipe.rollouts,
    )
    with noting_begin(arguments, call.trainer.events):
        end = attend(
            call,
            directory=directory,
            configuration=recipe.tables,
            origin=recipe.path,
            overrides=arguments.overrides,
            debug=arguments.debug,
            secrets=recipe.sampler.secrets(),
        )
    return end, directory


def _train_script(arguments: argparse.Namespace) -> tuple[RunEnd, Path]:
    from asyncrl.recipe.scripts import run_script
    from asyncrl.training.attended import attend
    from asyncrl.training.running import keep_in

    path: Path = arguments.recipe
    if arguments.overrides:
        raise ConfigError.for_value("--set", arguments.overrides[0], "left out: a script has its own options")
    if arguments.start is not None:
        allowed = "left out: a script says it itself, by rl.TorchLearner(.., adapter=..)"
        raise ConfigError.for_value("--from", str(arguments.start), allowed)
    ends: list[tuple[RunEnd, Path]] = []

    def make_run(call: RunCall, wanted: Path | None) -> RunEnd:
        directory = _folder(arguments) or wanted or new_folder(Path("runs"), path.stem)
        make_folder(directory, "--run-dir")
        with noting_begin(arguments, call.trainer.events):
            kept = keep_in(call, directory)
            end = attend(kept, directory=directory, configuration={}, origin=path, debug=arguments.debug)
        ends.append((end, directory))
        return end

    run_script(path, make_run)
    return ends[0]


def _start(arguments: argparse.Namespace, directory: Path) -> list[str]:
    """What the weights to start from change in the recipe. Adapters are copied: their run may remove them."""
    from asyncrl.recipe.trained import copied, find_trained

    own = directory / "start"
    if arguments.resume is not None and own.is_dir():
        return find_trained(own, None, key="start").overrides()
    if arguments.start is None:
        if arguments.version is not None:
            raise ConfigError.for_value("--version", arguments.version, "left out without --from")
        return []
    trained = find_trained(arguments.start, arguments.version, key="--from")
    say(f"starting from {trained.folder}")
    return (copied(trained, own) if trained.is_adapter else trained).overrides()


def _folder(arguments: argparse.Namespace) -> Path | None:
    """The folder that the command names."""
    if arguments.resume is not None:
        return require_run(arguments.resume, "--resume")
    return None if arguments.run_dir is None else require_unused(arguments.run_dir, "--run-dir")
