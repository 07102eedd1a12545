"""``asyncrl simulate``: other schedules of a recipe on a virtual clock."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.cli.common import Commands, add_overrides
from asyncrl.observe.console import say

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    simulate = commands.add("simulate", _simulate, "predict steps per hour and token age of other schedules in seconds")
    simulate.add_argument("recipe", type=Path, help="TOML file; its environment and model are not needed")
    add_overrides(simulate)
    simulate.late_flags = _flags


def _flags(parser: argparse.ArgumentParser) -> None:
    from asyncrl.simulation.options import add_simulation_flags

    add_simulation_flags(parser)


def _simulate(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.config import load_recipe
    from asyncrl.simulation.command import run_simulation
    from asyncrl.simulation.grid import RunOptions
    from asyncrl.simulation.options import read_options

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    lora = recipe.learner["lora"]
    run = RunOptions(
        path=recipe.path,
        engine=recipe.engine,
        trainer=recipe.trainer,
        steps=recipe.steps,
        lora_rank=None if lora is None else lora.r,
    )
    run_simulation(run, read_options(vars(arguments), run.name), say)
