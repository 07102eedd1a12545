"""What a person sees of a run on stderr, and how a signal ends it: for the command, and for scripts."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from asyncrl.concurrency.signals import cancelled_by

if TYPE_CHECKING:
    from asyncrl.events import Events

__all__ = ["Reporting", "reporting", "say", "until_signal"]

_SHOW_CURSOR = "\x1b[?25h"
# The live line hides it.
Reporting: TypeAlias = Literal["console", "json", "none"]


@contextlib.contextmanager
def reporting(
    events: Events, *, steps: int, style: Reporting = "console", debug: bool = False, secrets: Sequence[str] = ()
) -> Iterator[None]:
    """Log lines, and on a terminal a live line, on stderr while the block runs. ``secrets`` never reach it."""
    if style == "none":
        yield
        return
    from asyncrl.observe.logs import LogLines, open_log
    from asyncrl.observe.progress import show_progress

    with contextlib.ExitStack() as stack:
        stream = sys.stderr
        if style == "console":
            stream = stack.enter_context(show_progress(events, steps=steps, stream=stream))
        log = open_log(stream, style=style, debug=debug, secrets=secrets)
        lines = LogLines(log, steps=steps)
        stack.callback(lines.end)
        stack.callback(events.subscribe(lines.observe))
        yield


async def until_signal(work: Callable[[], Awaitable[None]]) -> bool:
    """Await ``work()``; the first SIGINT or SIGTERM cancels it and makes this True, the second exits the process."""
    signals = (signal.SIGINT, signal.SIGTERM)
    async with cancelled_by(signals, on_first=_say_that_it_stops, on_second=_show_cursor) as scope:
        await work()
    return scope.cancelled_caught


def say(text: str) -> None:
    """A line for people, on stderr."""
    print(f"asyncrl: {text}", file=sys.stderr, flush=True)


def _say_that_it_stops(number: signal.Signals) -> None:
    say(f"{number.name}: stopping, which takes at most a minute; a second signal exits at once")


def _show_cursor() -> None:
    if sys.stderr.isatty():
        print(_SHOW_CURSOR, end="", file=sys.stderr, flush=True)
