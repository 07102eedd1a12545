"""What the commands share: how they are declared, the recipe that they read, and the line that they print.

stdout carries the result, stderr everything for people.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from asyncrl.observe.console import say

if TYPE_CHECKING:
    from asyncrl.events import Events
    from asyncrl.recipe.config import Recipe

__all__ = ["EPILOG", "CommandParser", "Commands", "add_overrides", "load", "noting_begin", "print_result"]

EPILOG = """\
stdout carries one JSON line, the result; progress and errors go to stderr.

exit codes:
  0    done, or stopped by the first SIGINT or SIGTERM (the result then has "stopped": true)
  1    the run failed; the first error is on stderr, --debug adds its traceback
  2    the command line or the recipe is wrong; nothing was sampled or trained
  130  exited at once: the second SIGINT (143: SIGTERM), or the first before the run began
"""


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. What takes long to import is added when the command is used, or its help is shown.

    ``late_flags`` adds flags, ``late_epilog`` makes the end of the help.
    """

    late_flags: Callable[[argparse.ArgumentParser], None] | None = None
    late_epilog: Callable[[], str] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As any parser does."""
        self._add_flags()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """The text of ``--help``."""
        self._add_flags()
        if self.late_epilog is not None:
            self.epilog = self.late_epilog()
        return super().format_help()

    def _add_flags(self) -> None:
        add, self.late_flags = self.late_flags, None
        if add is not None:
            add(self)


class Commands:
    """The commands of ``parser``. Each file of a command adds its own."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(required=True, metavar="command", parser_class=CommandParser)

    def add(
        self, name: str, run: Callable[[argparse.Namespace], None], text: str, *, epilog: str = EPILOG
    ) -> CommandParser:
        """Declare a command that calls ``run`` with its arguments; ``text`` says what it does."""
        formatter = argparse.RawDescriptionHelpFormatter
        added = self._parsers.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=formatter)
        added.set_defaults(command=run)
        added.add_argument("--debug", action="store_true", help="more log lines, and tracebacks of errors")
        return added


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """``--set``, for commands that read a recipe."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="section.key=value",
        action="append",
        default=[],
        help="replace a value of the recipe (TOML, or a bare string); nothing after = is the default; can be repeated",
    )


def load(arguments: argparse.Namespace) -> Recipe:
    """The recipe that the arguments name, else the demo's, with their overrides. Raises ``ConfigError``."""
    from asyncrl.recipe.config import load_recipe
    from asyncrl.recipe.starters import examples

    path = arguments.recipe or examples() / "guess_number/recipe.toml"
    say(f"loading {path} (importing torch and, the first time, making the model can take half a minute)")
    recipe = load_recipe(path, arguments.overrides)
    if recipe.model.download:
        say(f"{recipe.model.path} is downloaded if it is not on this machine, which can take minutes")
    return recipe


@contextlib.contextmanager
def noting_begin(arguments: argparse.Namespace, events: Events) -> Iterator[None]:
    """Errors of the block are the run's own once its first version is live, whatever their class."""
    from asyncrl.events import VersionPublished

    # Servers and learner are up when the first version is live. Nothing was sampled before.
    unsubscribe = events.subscribe(arguments.published.append, kinds=(VersionPublished,))
    try:
        yield
    finally:
        unsubscribe()


def print_result(result: dict[str, Any], started: float, stopped: bool) -> None:
    """The JSON line of a command that began at ``started`` (monotonic seconds)."""
    rounded: dict[str, Any] = {
        # JSON has no NaN.
        key: (round(value, 4) if math.isfinite(value) else None) if isinstance(value, float) else value
        for key, value in result.items()
    }
    rounded["seconds"] = round(time.monotonic() - started, 1)
    if stopped:
        rounded["stopped"] = True
    print(json.dumps(rounded), flush=True)
