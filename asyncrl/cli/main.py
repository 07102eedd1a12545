"""The ``asyncrl`` command: init | train | demo | check | show | eval | export | recipe | serve | slurm | simulate | ..

It reads the arguments, hands them to a command, and maps what happens to an exit code. Each command is a file beside
this one; composition is in ``recipe``, the work in its owners.
"""

from __future__ import annotations

import argparse
import signal
import traceback
from collections.abc import Sequence

import asyncrl
from asyncrl.cli import check, evaluate, export, init, install, recipe, render, serve, show, simulate, slurm, train
from asyncrl.cli.common import EPILOG, Commands
from asyncrl.concurrency.endings import first_error
from asyncrl.errors import ConfigError
from asyncrl.observe.console import say
from asyncrl.observe.lastwords import last_words
from asyncrl.observe.pipes import lasting_streams

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    with lasting_streams():
        # Once the run has begun an error is the run's, also if its class is that of a wrong option.
        arguments = make_parser().parse_args(argv, argparse.Namespace(published=[]))
        try:
            arguments.command(arguments)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception as error:  # noqa: BLE001  the top: every error becomes a message and an exit code
            return _report(first_error(error), debug=arguments.debug, begun=bool(arguments.published))
        return 0


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"asyncrl {asyncrl.__version__}")
        parser.exit()


def _report(error: BaseException, *, debug: bool, begun: bool) -> int:
    if debug:
        traceback.print_exception(error)
    refused = isinstance(error, ConfigError) and not begun
    say(last_words(error, refused=refused))
    return 2 if refused else 1


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous reinforcement learning of language models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help="print it and end",
    )
    commands = Commands(parser)
    for command in (init, train, check, show, evaluate, export, recipe, simulate, render, serve, slurm, install):
        command.add(commands)
    return parser
