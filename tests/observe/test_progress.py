from __future__ import annotations

import io

import pytest

from asyncrl.events import Event, Events, GroupBorn, GroupFinished, SegmentSampled, StepFinished, VersionPublished
from asyncrl.observe.progress import ProgressState, show_progress

SEGMENT = SegmentSampled(
    time=0.0,
    group=0,
    member=0,
    version=0,
    prompt_tokens=5,
    cached_tokens=0,
    tokens=1200,
    queue_seconds=0.0,
    seconds=0.0,
)
STEP = StepFinished(time=0.0, n=4, model_step=4, metrics={"reward/mean": 0.25, "staleness/span_age_max": 2.0})


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def _state(*events: Event) -> ProgressState:
    state = ProgressState()
    for event in events:
        state.observe(event)
    return state


def test_the_line_says_what_runs_before_the_first_step() -> None:
    """Loading takes long, so the line tells loading from sampling, and shows tokens coming in."""
    assert "starting" in _state().text()
    published = VersionPublished(time=0.0, version=0, seconds=0.1, probe_error=0.0)
    born = (GroupBorn(time=0.0, group=0, version=0, due=2), GroupBorn(time=0.0, group=1, version=0, due=2))
    text = _state(published, *born, GroupFinished(time=0.0, group=0, seconds=1.0), SEGMENT).text()
    assert text == "sampling  1 groups  1,200 tokens"


def test_the_line_has_the_last_step() -> None:
    """Its number, reward and age; the tokens count from it."""
    state = _state(SEGMENT, STEP)
    assert state.step == 4
    assert state.text() == "reward 0.250  age 2  0 groups  0 tokens"


def test_log_lines_appear_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal both are there, and the observer is gone after the block."""
    monkeypatch.setenv("TERM", "xterm")
    events, terminal = Events(), Terminal()
    with show_progress(events, steps=10, stream=terminal) as stream:
        events.emit(STEP)
        stream.write("a log line\n")
    assert "a log line" in terminal.getvalue()
    assert "4/10" in terminal.getvalue()
    assert events._observers == []


def test_a_stream_that_is_no_terminal_gets_no_live_line() -> None:
    """A log file is not filled with control characters."""
    events, stream = Events(), io.StringIO()
    with show_progress(events, steps=10, stream=stream) as lines:
        events.emit(STEP)
        assert lines is stream
    assert stream.getvalue() == ""
