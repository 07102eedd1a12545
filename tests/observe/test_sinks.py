from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.events import EvaluationFinished, Event, Events, GroupAdmitted, Notice, StepFinished
from asyncrl.observe import sinks
from asyncrl.observe.sinks import encode_event, event_name, read_results, write_events


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_events_are_named_in_snake_case() -> None:
    """Files and logs use one name for a type of event."""
    assert event_name(StepFinished(time=0.0, n=1, model_step=1)) == "step_finished"


def test_an_event_is_one_json_object_whatever_it_holds() -> None:
    """Numbers that JSON lacks become null, objects their text, and the line stays one line."""
    event = Notice(time=1.5, name="odd", keys={"nan": float("nan"), "path": Path("a"), "text": "a\nb"})
    line = encode_event(event, epoch=1_700_000_000.0)
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "event": "notice",
        "at": "2023-11-14T22:13:21.500000Z",
        "time": 1.5,
        "name": "odd",
        "level": "info",
        "keys": {"nan": None, "path": "a", "text": "a\nb"},
    }


async def test_all_events_and_a_line_for_each_step_are_on_disk_after_the_block(tmp_path: Path) -> None:
    """Leaving the block flushes; events of other times are not written."""
    events = Events()
    events.emit(GroupAdmitted(time=0.0, group=0))
    async with write_events(tmp_path, events):
        for group in range(1, 101):
            events.emit(GroupAdmitted(time=1.0, group=group))
        events.emit(StepFinished(time=anyio.current_time(), n=1, model_step=1, metrics={"reward/mean": 0.5}))
    events.emit(GroupAdmitted(time=3.0, group=101))
    lines = _lines(tmp_path / "events.jsonl")
    assert [line["group"] for line in lines[:-1]] == list(range(1, 101))
    assert lines[-1]["event"] == "step_finished"
    [step] = _lines(tmp_path / "metrics.jsonl")
    assert (step["n"], step["model_step"], step["reward/mean"]) == (1, 1, 0.5)
    assert step["at"] == lines[-1]["at"]
    assert abs(datetime.fromisoformat(step["at"]) - datetime.now(UTC)) < timedelta(minutes=1)


async def test_files_with_and_without_the_time_of_the_wall_clock_are_read(tmp_path: Path) -> None:
    """A run that began under an older release goes on; the time is no metric."""
    old = b'{"n":1,"model_step":1,"time":2.0,"reward/mean":0.5}\n'
    (tmp_path / "metrics.jsonl").write_bytes(old)
    events = Events()
    async with write_events(tmp_path, events):
        events.emit(StepFinished(time=3.0, n=2, model_step=2, metrics={"reward/mean": 0.75}))
        events.emit(EvaluationFinished(time=4.0, version=2, metrics={"reward_mean": 1.0}))
    assert list(read_results(tmp_path)) == [
        StepFinished(time=2.0, n=1, model_step=1, metrics={"reward/mean": 0.5}),
        StepFinished(time=3.0, n=2, model_step=2, metrics={"reward/mean": 0.75}),
        EvaluationFinished(time=4.0, version=2, metrics={"reward_mean": 1.0}),
    ]


async def test_a_cancelled_run_still_writes_its_last_events(tmp_path: Path) -> None:
    """The last events are the ones that explain why a run was stopped."""
    events = Events()
    with anyio.CancelScope() as scope:
        async with write_events(tmp_path, events):
            events.emit(GroupAdmitted(time=0.0, group=7))
            scope.cancel()
            await anyio.sleep_forever()
    assert [line["group"] for line in _lines(tmp_path / "events.jsonl")] == [7]


async def test_an_error_in_the_block_still_writes_its_last_events(tmp_path: Path) -> None:
    """So do the events before a crash."""
    events = Events()
    with pytest.raises(ExceptionGroup) as raised:
        async with write_events(tmp_path, events):
            events.emit(GroupAdmitted(time=0.0, group=7))
            raise ValueError("the run failed")
    assert raised.group_contains(ValueError, match="the run failed")
    assert [line["group"] for line in _lines(tmp_path / "events.jsonl")] == [7]


async def test_a_failing_disk_ends_the_block_with_its_error(tmp_path: Path) -> None:
    """A run must not go on for hours without leaving its files; what happens while it ends raises nothing more."""
    events = Events()
    with pytest.raises(ExceptionGroup) as raised:
        async with write_events(tmp_path, events):
            (tmp_path / "events.jsonl").mkdir()
            events.emit(GroupAdmitted(time=0.0, group=7))
            try:
                await anyio.sleep_forever()
            finally:
                events.emit(GroupAdmitted(time=0.0, group=8))
    [error] = raised.value.exceptions
    assert isinstance(error, IsADirectoryError)


async def test_events_beyond_the_bound_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot keep up costs events, never memory, and the file says how many."""
    monkeypatch.setattr(sinks, "_PENDING_EVENTS", 3)
    events = Events()
    async with write_events(tmp_path, events) as files:
        await anyio.lowlevel.checkpoint()  # the writer waits for its first event
        for group in range(10):
            events.emit(GroupAdmitted(time=0.0, group=group))
        lost = files.lost
    lines = _lines(tmp_path / "events.jsonl")
    assert lost > 0
    assert [line["group"] for line in lines[:-1]] == list(range(10 - lost))
    assert (lines[-1]["name"], lines[-1]["keys"]) == ("events_lost", {"count": lost})


async def test_writing_happens_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread opens no file: a slow disk does not delay requests."""
    threads = set()
    append = sinks._append

    def watched(pending: list[Event], **where: Any) -> None:
        threads.add(threading.get_ident())
        append(pending, **where)

    monkeypatch.setattr(sinks, "_append", watched)
    events = Events()
    async with write_events(tmp_path, events):
        events.emit(GroupAdmitted(time=0.0, group=1))
    assert threads
    assert threading.get_ident() not in threads
