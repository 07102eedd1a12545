"""``asyncrl show``: how a run is doing, and what was said in it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from asyncrl.cli.common import Commands
from asyncrl.observe.console import say

__all__ = ["add"]

_LIMIT = 10
_CHOICES = ("step", "group", "best", "worst", "evaluation", "grep", "limit", "tokens", "json")
_EPILOG = """\
without options: one screen about the run. With any of them: conversations, of the last step that was kept if --step
does not say another (--grep looks through all steps).

examples:
  asyncrl show runs/first
  asyncrl show runs/first --worst --limit 3
  asyncrl show runs/first --evaluation --grep "I cannot" | less
"""


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    show = commands.add("show", _show, "how a run is doing, in one screen; or conversations of it", epilog=_EPILOG)
    show.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    show.add_argument("--step", type=int, metavar="N", help="conversations of this step")
    show.add_argument("--group", type=int, metavar="G", help="of this group")
    show.add_argument("--best", action="store_true", help="the best of each group, those with the highest reward first")
    show.add_argument("--worst", action="store_true", help="the worst of each group, those with the lowest first")
    show.add_argument("--evaluation", action="store_true", help="of evaluations, instead of steps")
    show.add_argument("--grep", metavar="TEXT", default="", help="those that have this text, in upper or lower case")
    show.add_argument("--limit", type=int, metavar="N", help="at most so many (10; 0: all)")
    show.add_argument("--tokens", action="store_true", help="with token ids, and log-probabilities of those sampled")
    show.add_argument("--json", action="store_true", help="as JSON lines, with everything that is kept")


def _show(arguments: argparse.Namespace) -> None:
    from asyncrl.checkpoint.folders import require_run

    require_run(arguments.run, "RUN")
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # a sign that the terminal does not have is no error
    values = vars(arguments)
    if any(values[name] or type(values[name]) is int for name in _CHOICES):
        _show_conversations(arguments)
    else:
        _show_report(arguments.run)


def _show_report(directory: Path) -> None:
    from asyncrl.observe.pages import Page
    from asyncrl.observe.report import report
    from asyncrl.observe.rollouts import read_rollouts, rollout_files
    from asyncrl.observe.runfiles import read_run

    steps = [n for n, evaluation, _ in rollout_files(directory) if not evaluation]
    last = next(read_rollouts(directory, step=steps[-1], evaluation=""), None) if steps else None
    page = Page(sys.stdout)
    page.show(report(read_run(directory), last, now=time.time(), width=page.width))


def _show_conversations(arguments: argparse.Namespace) -> None:
    from rich.text import Text

    from asyncrl.errors import require_count
    from asyncrl.observe.conversations import conversation, token_line
    from asyncrl.observe.pages import Page
    from asyncrl.observe.selection import Choice, selected

    limit = _LIMIT if arguments.limit is None else arguments.limit
    require_count("--limit", limit, least=0)
    choice = Choice(**{name: getattr(arguments, name) for name in _CHOICES if name not in ("json", "limit", "tokens")})
    page, count = Page(sys.stdout), 0
    for traj in selected(arguments.run, choice):
        if getattr(sys.stdout, "gone", False):
            return
        count += 1
        if limit and count > limit:
            say(f"there are more than these {limit} conversations: --limit 0 shows all")
            return
        if arguments.json:
            print(json.dumps(traj))
        else:
            page.show([*conversation(traj), *([token_line(traj)] if arguments.tokens else []), Text()])
    if not count:
        say("no conversation that is kept is like that")
