"""``asyncrl init``: a folder to begin with."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from asyncrl.cli.common import Commands

__all__ = ["add"]

_VARIANTS = {
    "tools": "the model calls a tool",
    "judge": "the reward asks another model",
    "script": "a Python script in the place of recipe.toml",
}
_THEN = {"script": ("python train.py", "asyncrl show runs/..")}
_THEN_BY_RECIPE = ("asyncrl check recipe.toml", "asyncrl train recipe.toml")


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    text = "write a first environment with its recipe and its tests, which work as they are"
    init = commands.add("init", _init, text, epilog="")
    init.add_argument("folder", type=Path, help="is made; its name has letters, digits, _ and -")
    variant = init.add_mutually_exclusive_group()
    for name, what in _VARIANTS.items():
        variant.add_argument(f"--{name}", dest="variant", action="store_const", const=name, default="plain", help=what)


def _init(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.starters import write_starter

    folder: Path = arguments.folder
    files = write_starter(folder, arguments.variant)
    lines = [
        f"wrote {len(files)} files into {folder}: {', '.join(files)}",
        "next:",
        f"  cd {shlex.quote(str(folder))} && pytest -q",
        *(f"  {command}" for command in _THEN.get(arguments.variant, _THEN_BY_RECIPE)),
    ]
    print("\n".join(lines))
