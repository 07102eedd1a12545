"""What a simulation says: a JSON line for programs and a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """One line. ``measured`` is what the recorded run did; it stands at the recipe's own point only."""
    shares = outcome.shares
    line: dict[str, object] = {
        "max_staleness": outcome.point.max_staleness,
        "admit_ahead": outcome.point.admit_ahead,
        "concurrency": outcome.point.concurrency,
        "oversample_factor": outcome.point.oversample_factor,
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
    """In a few words."""
    words = [
        f"max_staleness {point.max_staleness}",
        f"admit_ahead {point.admit_ahead}",
        f"concurrency {point.concurrency}",
    ]
    if point.oversample_factor != 1:
        words.append(f"oversample_factor {point.oversample_factor:g}")
    return ", ".join(words)


def rate(steps_per_hour: float) -> str:
    """Three digits, or whole steps if there are more."""
    return f"{steps_per_hour:,.0f}" if steps_per_hour >= 100 else f"{steps_per_hour:.3g}"


def print_table(outcomes: Sequence[Outcome], stream: IO[str]) -> None:
    """The recipe's own point, which is the first, is marked."""
    caption = "training .. publication: parts of the trainer's time; age: of trained tokens, in policy versions"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, caption=caption, caption_justify="left")
    for heading in ("", "staleness", "ahead", "concurrency", "oversample", "steps/h"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("training", "samples", "barrier", "publication", "age", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, outcome in enumerate(outcomes, start=1):
        table.add_row(*_cells(number, outcome), style="bold" if number == 1 else None)
    Console(file=stream, width=None if stream.isatty() else _WIDTH).print(table)


def _cells(number: int, outcome: Outcome) -> Sequence[str]:
    point, shares = outcome.point, outcome.shares
    parts = (outcome.training_share, shares["wait_for_samples"], shares["barrier"], shares["publication"])
    return (
        f"recipe {number}" if number == 1 else str(number),
        str(point.max_staleness),
        str(point.admit_ahead),
        str(point.concurrency),
        f"{point.oversample_factor:g}",
        rate(outcome.steps_per_hour),
        *(f"{part:.0%}" for part in parts),
        f"{outcome.age_mean:.2f}",
        str(outcome.age_p99),
    )
