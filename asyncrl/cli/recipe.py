"""``asyncrl recipe``: every key of a recipe, and every metric, with what it means."""

from __future__ import annotations

import argparse
import shutil

from asyncrl.cli.common import Commands

__all__ = ["add"]

_WIDEST = 120


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    text = "print every key of a recipe with its type, its default and what it does; or every metric"
    recipe = commands.add("recipe", _print, text, epilog="")
    recipe.add_argument("part", nargs="?", default="", help="a section, a key, or with --metrics the begin of a name")
    what = recipe.add_mutually_exclusive_group()
    what.add_argument("--metrics", action="store_true", help="the metrics of steps and evaluations instead")
    what.add_argument("--markdown", action="store_true", help="everything, as the file envs/REFERENCE.md")
    recipe.late_epilog = _epilog


def _epilog() -> str:
    """All keys."""
    from asyncrl.recipe.referencepages import key_page

    return key_page("", width=_width())


def _print(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.referencepages import key_page, markdown, metric_page

    if arguments.markdown:
        print(markdown(), end="")
    elif arguments.metrics:
        print(metric_page(arguments.part, width=_width()))
    else:
        print(key_page(arguments.part, width=_width()))


def _width() -> int:
    return min(_WIDEST, shutil.get_terminal_size().columns)
