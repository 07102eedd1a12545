"""``asyncrl slurm``: a recipe as a job of a cluster."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from asyncrl.cli.common import EPILOG, Commands, add_overrides
from asyncrl.errors import ConfigError

__all__ = ["add"]

_EPILOG = """\
The job has the learner's ranks (model.ranks) on its first nodes, SGLang servers (sampler.servers, each with
sampler.tensor_parallel GPUs) on the others, and the driver on the first; a run that fits has all of them on one. What
ends first ends the others. The nodes must see this folder, the recipe and this Python.

"""


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    slurm = commands.add("slurm", _slurm, "train a recipe as a job of a Slurm cluster", epilog=_EPILOG + EPILOG)
    slurm.add_argument("recipe", type=Path, help="TOML file, paths in it are relative to it")
    add_overrides(slurm)
    slurm.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of the run (default: one of the job's own)")
    slurm.add_argument("--dry-run", action="store_true", help="print the script of the job, and submit nothing")
    slurm.late_flags = _flags


def _flags(parser: argparse.ArgumentParser) -> None:
    from asyncrl.flags import add_flags
    from asyncrl.recipe.slurm import SlurmOptions

    names = [name for name in SlurmOptions.__dataclass_fields__ if name != "sbatch"]
    add_flags(parser.add_argument_group("of the job"), SlurmOptions, names)
    parser.add_argument(
        "--sbatch",
        action="append",
        default=argparse.SUPPRESS,
        metavar="OPTION",
        help="a further option of sbatch, written --sbatch=--constraint=h100; can be repeated",
    )


def _slurm(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.config import load_recipe
    from asyncrl.recipe.slurm import SlurmOptions, render

    given = {name: value for name, value in vars(arguments).items() if name in SlurmOptions.__dataclass_fields__}
    options = SlurmOptions(**{**given, "sbatch": tuple(given.get("sbatch", ()))})
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    script = render(recipe, options, overrides=arguments.overrides, run_dir=arguments.run_dir)
    if arguments.dry_run:
        print(script, end="")
        return
    print(json.dumps({"job": _submit(script)}), flush=True)


def _submit(script: str) -> str:
    """The number of the new job."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, text=True, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError("sbatch is not on this machine; --dry-run prints the script") from error
    if done.returncode != 0:
        raise ConfigError(f"sbatch refuses the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
