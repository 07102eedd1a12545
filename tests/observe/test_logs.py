from __future__ import annotations

import io
import json
from typing import Any

import pytest

from asyncrl.events import (
    BarrierOpened,
    EvaluationFinished,
    Event,
    GroupAdmitted,
    MemberFailed,
    Notice,
    StepFinished,
    VersionPublished,
)
from asyncrl.observe.logs import LogLines, open_log
from asyncrl.types import BarrierWait

STEP = StepFinished(
    time=1.0, n=3, model_step=2, metrics={"reward/mean": 0.123456789, "staleness/span_age_max": 2.0, "other": 9.0}
)


def _json_lines(*events: Event, debug: bool = False) -> list[dict[str, Any]]:
    stream = io.StringIO()
    lines = LogLines(open_log(stream, style="json", debug=debug))
    for event in events:
        lines.observe(event)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_step_is_a_line_with_the_numbers_that_matter() -> None:
    """Four digits; the other metrics are in the files."""
    [line] = _json_lines(STEP)
    assert line.pop("timestamp")
    assert line == {
        "event": "step_finished",
        "level": "info",
        "n": 3,
        "model_step": 2,
        "reward": 0.1235,
        "max_age": 2.0,
    }


@pytest.mark.parametrize(
    ("event", "name", "level"),
    [
        (EvaluationFinished(time=0.0, version=4, metrics={"reward_mean": 0.5}), "evaluation_finished", "info"),
        (MemberFailed(time=0.0, group=1, member=2, attempt=1, error="ValueError: no"), "member_failed", "warning"),
        (Notice(time=0.0, name="slow_server", level="warning", keys={"server": "a"}), "slow_server", "warning"),
    ],
)
def test_what_a_person_follows_is_a_line(event: Event, name: str, level: str) -> None:
    """Evaluations, failed members and notices are seen without asking for more."""
    [line] = _json_lines(event)
    assert (line["event"], line["level"]) == (name, level)


def test_details_are_lines_only_when_asked_for() -> None:
    """Publications and barrier waits happen every step: they are debug lines; the rest is for the files."""
    events = (
        VersionPublished(time=0.0, version=1, seconds=0.5, probe_error=1e-6),
        BarrierOpened(time=0.0, wait=BarrierWait(seconds=0.5, group=3, member=1, doing="sampling")),
        GroupAdmitted(time=0.0, group=1),
    )
    assert _json_lines(*events) == []
    assert [line["event"] for line in _json_lines(*events, debug=True)] == ["version_published", "barrier_opened"]


def test_a_console_line_is_readable_without_colours() -> None:
    """A stream that is no terminal gets plain text."""
    stream = io.StringIO()
    LogLines(open_log(stream)).observe(STEP)
    [line] = stream.getvalue().splitlines()
    assert "\x1b" not in line
    assert "step_finished" in line
    assert "reward=0.1235" in line


@pytest.mark.parametrize("style", ["console", "json"])
def test_secrets_never_reach_the_stream(style: Any) -> None:
    """Not as a value, not inside an error's text or a nested value, not in the event's name."""
    stream = io.StringIO()
    log = open_log(stream, style=style, secrets=["hush-1234"])
    log.warning(
        "refused hush-1234", header="Bearer hush-1234", error=ValueError("key hush-1234"), keys={"a": "hush-1234"}
    )
    assert "hush" not in stream.getvalue()
    assert stream.getvalue().count("[secret]") == 4
