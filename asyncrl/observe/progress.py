"""One live line on a terminal: how far the run is, and that it is alive. Elsewhere nothing; log lines say it there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from asyncrl.events import (
    EvaluationFinished,
    Event,
    Events,
    GroupBorn,
    GroupDropped,
    GroupFinished,
    GroupRerolled,
    SegmentSampled,
    StepFinished,
    Underway,
    VersionPublished,
)

__all__ = ["ProgressState", "show_progress"]


class ProgressState:
    """What the line says, kept up to date by ``observe``."""

    def __init__(self) -> None:
        self.step = 0
        self._born: set[int] = set()
        self._tokens = 0
        self._words = "starting"
        self._published = False
        # Any version: the run samples from then on.

    @property
    def running(self) -> int:
        """Groups that sample or wait on tools."""
        return len(self._born)

    def observe(self, event: Event) -> None:
        """Take note of ``event``."""
        match event:
            case GroupBorn(group=group):
                self._born.add(group)
            case GroupFinished(group=group) | GroupRerolled(group=group) | GroupDropped(group=group):
                self._born.discard(group)
            case SegmentSampled():
                self._tokens += event.tokens
            case StepFinished():
                self.step = event.n
                self._tokens = 0
                reward = event.metrics.get("reward/mean", 0.0)
                age = event.metrics.get("staleness/span_age_max", 0.0)
                self._words = f"reward {reward:.3f}  age {age:.0f}"
            case EvaluationFinished():
                self._words = f"held-out reward {event.metrics.get('reward_mean', 0.0):.3f}"
            case Underway():
                self._words = f"{event.what}  {event.done}/{event.total}" if event.total else event.what
            case VersionPublished() if not self._published:
                self._published = True
                self._words = "sampling"

    def text(self) -> str:
        """The words beside the bar."""
        return f"{self._words}  {self.running} groups  {self._tokens:,} tokens"


@contextmanager
def show_progress(events: Events, *, steps: int, stream: TextIO) -> Iterator[TextIO]:
    """Keep a live line at the end of ``stream`` for the block, if it is a terminal.

    Yields the stream that log lines must be written to in the meantime, so that they appear above the line.
    """
    console = Console(file=stream)
    if not console.is_terminal:
        yield stream
        return
    # The words take what the terminal's width leaves, and are cut first.
    words = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    bar = BarColumn(bar_width=12)
    columns = (TextColumn("step"), MofNCompleteColumn(), bar, words, TimeElapsedColumn(), TimeRemainingColumn())
    state = ProgressState()
    # What a script prints on the same terminal appears above the line too. Elsewhere stdout has its own reader.
    shared = sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, expand=True, redirect_stdout=shared) as progress:
        line = progress.add_task(state.text(), total=steps)

        def observe(event: Event) -> None:
            # Drawing is the business of rich's own thread, a few times a second.
            state.observe(event)
            progress.update(line, completed=state.step, description=state.text())

        unsubscribe = events.subscribe(observe)
        try:
            yield cast(TextIO, FileProxy(console, stream))
        finally:
            unsubscribe()
