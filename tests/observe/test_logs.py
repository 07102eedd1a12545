from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.events import (
    BarrierOpened,
    EvaluationFinished,
    Event,
    GroupAdmitted,
    GroupDropped,
    MemberFailed,
    Notice,
    StepFinished,
    ToolFailed,
    Underway,
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
        "step": 3,
        "reward": 0.1235,
        "age": 2,
        "version": 2,
        "steps_without_gradient": 1,
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


def _failed(member: int, error: str = "KeyError: 'a'", where: str = "env.py:3 in Sums.reward") -> MemberFailed:
    return MemberFailed(time=0.0, group=member // 8, member=member % 8, attempt=1, error=error, where=where)


def test_failures_of_one_kind_are_one_line_and_then_a_count() -> None:
    """The line of the user's code and the kind of error decide; without such a line the text does."""
    events: list[Event] = [_failed(member, f"KeyError: '{member}'") for member in range(8)]
    events += [GroupDropped(time=0.0, group=0, reason="failed", error="KeyError: '0'", where="env.py:3 in Sums.reward")]
    events += [_failed(9, "ValueError: no"), _failed(10, "gone", ""), _failed(11, "gone", ""), _failed(12, "lost", "")]
    lines = _json_lines(*events, STEP)
    told = [(line["event"], line.get("error"), line.get("more"), line.get("where")) for line in lines]
    where = "env.py:3 in Sums.reward"
    assert told == [
        ("member_failed", "KeyError: '0'", None, where),
        ("group_dropped", "KeyError", None, where),
        ("member_failed", "ValueError: no", None, where),
        ("member_failed", "gone", None, None),
        ("member_failed", "lost", None, None),
        ("member_failed", "KeyError", 7, where),
        ("member_failed", "gone", 1, None),
        ("step_finished", None, None, None),
    ]


@given(st.lists(st.sampled_from(["a", "b", "tool", "step"]), max_size=300))
def test_every_failure_is_told_or_counted(kinds: list[str]) -> None:
    """First lines and counts sum up to what there was; nothing is told twice; a kind has few lines in a step."""
    stream = io.StringIO()
    lines = LogLines(open_log(stream, style="json"))
    for kind in kinds:
        if kind == "step":
            lines.observe(STEP)
        elif kind == "tool":
            lines.observe(ToolFailed(time=0.0, group=0, member=0, tool="add", error="OSError: x", where="env.py:9"))
        else:
            lines.observe(_failed(0, kind, ""))
    lines.end()
    lines.end()
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    for kind, name in (("a", "a"), ("b", "b"), ("tool", "OSError")):
        own = [line for line in told if str(line.get("error", "")).startswith(name)]
        assert sum(line.get("more", 1) for line in own) == kinds.count(kind)
        assert len(own) <= 4 + kinds.count("step")
        assert all("more" in line for line in own[1:])


@pytest.mark.parametrize(("seconds", "left"), [(0.6, "10s"), (4.0, "1m08s"), (300.0, "1h25m")])
def test_a_step_is_read_from_the_left(seconds: float, left: str) -> None:
    """How far the run is, how good and how old its data are, how long a step takes, and how long the others will."""
    stream = io.StringIO()
    lines = LogLines(open_log(stream), steps=20)
    metrics = {"sampling/interval_seconds": seconds, "loss/loss": 0.25, **STEP.metrics}
    lines.observe(StepFinished(time=1.0, n=3, model_step=3, metrics=metrics))
    keys = [word.split("=") for word in stream.getvalue().split() if "=" in word]
    assert [name for name, _ in keys] == ["step", "reward", "age", "seconds", "left", "version", "loss"]
    assert dict(keys)["step"] == "3/20"
    assert dict(keys)["left"] == left


def test_what_takes_long_is_told_when_it_begins_and_every_few_seconds() -> None:
    """Another thing has its line at once; a count has one each five seconds, and its last one."""
    events = [Underway(time=float(done), what="replaying steps", done=done, total=9) for done in range(1, 10)]
    lines = _json_lines(Underway(time=0.0, what="loading the model"), *events)
    assert [(line["event"], line["what"], line.get("done")) for line in lines] == [
        ("under_way", "loading the model", None),
        ("under_way", "replaying steps", "1/9"),
        ("under_way", "replaying steps", "6/9"),
        ("under_way", "replaying steps", "9/9"),
    ]


def test_a_notice_says_once_what_to_do() -> None:
    """The hint stands at the first notice of a name; later ones have their keys only."""
    held = Notice(time=0.0, name="loop_held", level="warning", keys={"function": "reward (env.py:3)"})
    first, second = _json_lines(held, held)
    assert "def" in first["hint"]
    assert first["function"] == second["function"] == "reward (env.py:3)"
    assert "hint" not in second


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
