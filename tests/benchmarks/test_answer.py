"""The line that a benchmark prints."""

from __future__ import annotations

import json

from benchmarks.answer import Answer


def test_an_answer_is_one_line_of_json() -> None:
    """All keys are there, numbers are short, and what was not measured is null."""
    answer = Answer(
        question="how long?",
        figure=1.23456789,
        unit="us",
        anchor="something else",
        anchor_figure=None,
        ratio=None,
        goal="at most 10 us",
        meets_goal=True,
    )
    assert answer.line().count("\n") == 0
    assert json.loads(answer.line()) == {
        "question": "how long?",
        "figure": 1.2346,
        "unit": "us",
        "anchor": "something else",
        "anchor_figure": None,
        "ratio": None,
        "goal": "at most 10 us",
        "meets_goal": True,
    }
