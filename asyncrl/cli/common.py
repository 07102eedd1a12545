"""What the commands share: how they are declared, what they say and print, and how a signal ends them.

stdout carries the result, stderr everything for people.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.concurrency.signals import cancelled_by

if TYPE_CHECKING:
    from asyncrl.events import Events
    from asyncrl.recipe.config import Recipe

__all__ = ["EPILOG", "Commands", "add_overrides", "load", "print_result", "reporting", "say", "until_signal"]

_SHOW_CURSOR = "\x1b[?25h"
# The live line hides it.
EPILOG = """\
stdout carries one JSON line, the result; progress and errors go to stderr.

exit codes:
  0    done, or stopped by the first SIGINT or SIGTERM (the result then has "stopped": true)
  1    the run failed; the first error is on stderr, --debug adds its traceback
  2    the command line or the recipe is wrong; nothing was sampled or trained
  130  exited at once: the second SIGINT (143: SIGTERM), or the first before the run began
"""


class Commands:
    """The commands of ``parser``. Each file of a command adds its own."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(required=True, metavar="command")

    def add(
        self, name: str, run: Callable[[argparse.Namespace], None], text: str, *, epilog: str = EPILOG
    ) -> argparse.ArgumentParser:
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
        help="replace a value of the recipe (TOML, or a bare string); can be repeated",
    )


def load(arguments: argparse.Namespace) -> Recipe:
    """The recipe that the arguments name, else the demo's, with their overrides. Raises ``ConfigError``."""
    from asyncrl.recipe.config import load_recipe

    path = arguments.recipe or _demo_recipe()
    say(f"loading {path} (importing torch and, the first time, making the model can take half a minute)")
    return load_recipe(path, arguments.overrides)


def _demo_recipe() -> Path:
    """Beside the package in a checkout, inside it when installed."""
    from asyncrl.errors import ConfigError

    package = Path(__file__).parents[1]
    found = [root / "envs/guess_number/recipe.toml" for root in (package.parent, package)]
    for recipe in found:
        if recipe.is_file():
            return recipe
    raise ConfigError(f"the demo's recipe is in neither {found[0]} nor {found[1]}")


async def until_signal(work: Callable[[], Awaitable[None]]) -> bool:
    """Await ``work()``; the first SIGINT or SIGTERM cancels it and makes this True, the second exits the process."""
    signals = (signal.SIGINT, signal.SIGTERM)
    async with cancelled_by(signals, on_first=_say_that_it_stops, on_second=_show_cursor) as scope:
        await work()
    return scope.cancelled_caught


def _say_that_it_stops(number: signal.Signals) -> None:
    say(f"{number.name}: stopping, which takes at most a minute; a second signal exits at once")


def _show_cursor() -> None:
    if sys.stderr.isatty():
        print(_SHOW_CURSOR, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def reporting(arguments: argparse.Namespace, recipe: Recipe, events: Events, *, steps: int) -> Iterator[None]:
    """Log lines, and on a terminal a live line, on stderr while the block runs; and whether the run has begun."""
    from asyncrl.events import VersionPublished
    from asyncrl.observe.logs import LogLines, open_log
    from asyncrl.observe.progress import show_progress

    style = recipe.run.log
    # Servers and learner are up when the first version is live. Nothing was sampled before.
    events.subscribe(arguments.published.append, kinds=(VersionPublished,))
    with contextlib.ExitStack() as stack:
        stream = sys.stderr
        if style == "console":
            stream = stack.enter_context(show_progress(events, steps=steps, stream=stream))
        log = open_log(stream, style=style, debug=arguments.debug, secrets=recipe.sampler.secrets())
        stack.callback(events.subscribe(LogLines(log).observe))
        yield


def print_result(result: dict[str, Any], started: float, stopped: bool) -> None:
    """The JSON line of a command that began at ``started`` (monotonic seconds)."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}
    rounded["seconds"] = round(time.monotonic() - started, 1)
    if stopped:
        rounded["stopped"] = True
    print(json.dumps(rounded), flush=True)


def say(text: str) -> None:
    """A line for people, on stderr."""
    print(f"asyncrl: {text}", file=sys.stderr, flush=True)
