"""What a simulation says: a JSON line for programs and a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from asyncrl.simulation.grid import Point
from asyncrl.simulation.simulate import Outcome

__all__ = ["as_json", "describe", "print_table", "rate"]

_WIDTH = 120
# Of the table where nobody sees a terminal.


def as_json(outcome: Outcome, *, recipe: bool, measured: float | None) -> Mapping[str, object]:
    """A line of stdout. ``measured`` is what the recorded run did; it stands at the recipe's own point only."""
    shares = outcome.shares
    line: dict[str, object] = {
        **asdict(outcome.point),
        "recipe": recipe,
        "steps": outcome.steps,
        "steps_per_hour": outcome.steps_per_hour,
        "trained_tokens_per_second": outcome.tokens_per_second,
        "trainer_idle": 1 - outcome.training_share,
        "wait_for_samples_share": shares["wait_for_samples"],
        "barrier_share": shares["barrier"],
        "publication_share": shares["publication"],
        "age_mean": outcome.age_mean,
        "age_p99": outcome.age_p99,
    }
    if measured is not None:
        line["measured_steps_per_hour"] = measured
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}


def describe(point: Point) -> str:
    """The point's values by their names, without what is usual."""
    usual = {"oversample_factor": "1"}
    return ", ".join(f"{name} {text}" for name, text in point.texts().items() if usual.get(name) != text)


def rate(steps_per_hour: float) -> str:
    """Three digits, or whole steps if there are more."""
    return f"{steps_per_hour:,.0f}" if steps_per_hour >= 100 else f"{steps_per_hour:.3g}"


def print_table(outcomes: Sequence[Outcome], stream: IO[str]) -> None:
    """The recipe's own point, which is the first, is marked."""
    caption = "training .. publication: parts of the trainer's time; age: of trained tokens, in policy versions"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, caption=caption, caption_justify="left")
    points = ("", "staleness", "ahead", "concurrency", "oversample", "steps/h")
    for heading in (*points, "training", "samples", "barrier", "publication", "age", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, outcome in enumerate(outcomes, start=1):
        table.add_row(*_cells(number, outcome), style="bold" if number == 1 else None)
    Console(file=stream, width=None if stream.isatty() else _WIDTH).print(table)


def _cells(number: int, outcome: Outcome) -> Sequence[str]:
    return (
        f"recipe {number}" if number == 1 else str(number),
        *outcome.point.texts().values(),
        rate(outcome.steps_per_hour),
        *(f"{part:.0%}" for part in outcome.parts),
        f"{outcome.age_mean:.2f}",
        str(outcome.age_p99),
    )
