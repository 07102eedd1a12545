"""``asyncrl render``: what the model will read of a row."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import anyio

from asyncrl.cli.common import Commands, add_overrides, load
from asyncrl.observe.console import say

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    render = commands.add("render", _render, "print what the model will read of a row, each token with what it is")
    render.add_argument("recipe", type=Path, help="TOML file")
    render.add_argument("--row", type=int, default=0, metavar="N", help="of data.train (0)")
    add_overrides(render)


def _render(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.rendering import render_row

    anyio.run(partial(render_row, load(arguments), arguments.row, say=say), backend="asyncio")
