"""One answer of a benchmark: a figure, what it is compared with, and whether it is good enough."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A benchmark prints one of these as a line of JSON for each question.

    Example: ``Answer(question="..", figure=2.1, unit="us", anchor="the same at 24", anchor_figure=2.0, ratio=1.05,
    goal="at most 10 us", meets_goal=True)``.
    """

    question: str
    figure: float | None
    """None if it could not be measured."""
    unit: str
    anchor: str
    anchor_figure: float | None
    ratio: float | None
    """``figure`` over ``anchor_figure``."""
    goal: str
    meets_goal: bool

    def line(self) -> str:
        """The answer as one line of JSON, numbers with five digits."""
        return json.dumps({key: _rounded(value) for key, value in asdict(self).items()})


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
