"""The files of a run that other programs read: ``events.jsonl`` and ``metrics.jsonl``.

Each event is one line ``{"event": "step_finished", ..}``; each trainer step is also one line of metrics. ``time`` is
the event loop's, in seconds from anywhere; ``at`` is the same moment on the wall clock (ISO 8601, UTC), from one look
at both clocks when the writer begins. Encoding and writing happen in a worker thread. The event loop only hands events
over, through a bounded stream: if the disk cannot keep up, the events beyond the bound are counted and their number is
written, and the run is not slowed down. Reading the files back is left to their readers.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import orjson
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncrl.events import EvaluationFinished, Event, Events, Notice, StepFinished
from asyncrl.files import reading
from asyncrl.observe.hints import HINTS

__all__ = ["EventFiles", "encode_event", "event_name", "last_logged_step", "read_results", "write_events"]

_PENDING_EVENTS = 65_536
# About a minute of a run with a thousand requests a second: a disk that is slower than that is not coming back.
_BLOCK_BYTES = 65_536
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z


def event_name(event: Event) -> str:
    """The event's type in snake_case, as it stands in logs and files: ``StepFinished`` is ``step_finished``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()


def encode_event(event: Event, *, epoch: float = 0.0) -> bytes:
    """One line of JSON. Numbers that JSON does not have (NaN, infinities) become null, unknown objects their text.

    A notice gets its hint. ``epoch``: seconds since 1970 when the loop's time was 0.
    """
    line: dict[str, object] = {"event": event_name(event), "at": _wall_clock(event, epoch)}
    line |= {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if isinstance(event, Notice) and event.name in HINTS:
        line["hint"] = HINTS[event.name]
    return orjson.dumps(line, default=str, option=_OPTIONS)


class EventFiles:
    """Hands events to the writer. ``observe`` is its observer; ``lost`` counts the events beyond the bound."""

    def __init__(self, stream: MemoryObjectSendStream[Event]) -> None:
        self._stream = stream
        self.lost = 0

    def observe(self, event: Event) -> None:
        """Queue ``event`` for writing; never waits."""
        try:
            self._stream.send_nowait(event)
        except (anyio.WouldBlock, anyio.BrokenResourceError):
            # Broken: the writer failed, and its error is already ending the run.
            self.lost += 1


@asynccontextmanager
async def write_events(directory: Path, events: Events) -> AsyncGenerator[EventFiles]:
    """Write all events of the block into ``directory``; on leaving it, whatever the reason, everything is on disk.

    A write that fails ends the block with its ``OSError``, in an exception group.
    """
    await anyio.to_thread.run_sync(_mend, directory)
    send, receive = anyio.create_memory_object_stream[Event](_PENDING_EVENTS)
    files = EventFiles(send)
    append = partial(_append, directory=directory, epoch=time.time() - anyio.current_time())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_write, receive, files, append)
        unsubscribe = events.subscribe(files.observe)
        try:
            yield files
        finally:
            unsubscribe()
            send.close()


async def _write(
    receive: MemoryObjectReceiveStream[Event], files: EventFiles, append: Callable[[Sequence[Event]], None]
) -> None:
    # Shielded: a cancelled run ends by closing the stream, and its last events are the ones that explain it.
    with anyio.CancelScope(shield=True), receive:
        async for event in receive:
            pending = [event]
            while receive.statistics().current_buffer_used:
                pending.append(receive.receive_nowait())
            await anyio.to_thread.run_sync(append, pending)
        if files.lost:
            notice = Notice(time=anyio.current_time(), name="events_lost", level="warning", keys={"count": files.lost})
            await anyio.to_thread.run_sync(append, [notice])


def read_results(directory: Path) -> Iterator[Event]:
    """The steps and evaluations that a run has in its files, without what else is known of them. Blocking.

    A notice stands for a line that cannot be read.
    """
    for name, wanted in _RESULTS:
        for number, line in _lines(directory / name, wanted):
            try:
                value = orjson.loads(line)
                yield _evaluation(value) if wanted else _step(value)
            except (ValueError, KeyError, TypeError, AttributeError):
                keys = {"path": str(directory / name), "line": number}
                yield Notice(time=0.0, name="line_unreadable", level="warning", keys=keys)


def last_logged_step(directory: Path) -> tuple[Path, int] | None:
    """The last step that the run's files tell of, and in which; None if they tell of none. Blocking."""
    for name, wanted in (("metrics.jsonl", b""), ("events.jsonl", b'"event":"step_finished"')):
        steps = [step for _, line in _lines(directory / name, wanted) if (step := _number(line)) is not None]
        if steps:
            return directory / name, steps[-1]
    return None


_NO_METRICS = ("n", "model_step", "time", "at")
# Of a line of ``metrics.jsonl``.
_RESULTS = (("metrics.jsonl", b""), ("events.jsonl", b'"event":"evaluation_finished"'))


def _lines(path: Path, wanted: bytes) -> Iterator[tuple[int, bytes]]:
    """The whole lines with ``wanted`` in them, and their numbers."""
    if not path.exists():
        return
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if wanted in line and line.endswith(b"\n"):
                yield number, line


def _number(line: bytes) -> int | None:
    try:
        n = orjson.loads(line)["n"]
    except (ValueError, KeyError, TypeError):
        return None
    return n if isinstance(n, int) else None


def _step(value: Mapping[str, Any]) -> StepFinished:
    metrics = _numbers({key: number for key, number in value.items() if key not in _NO_METRICS})
    return StepFinished(time=value["time"], n=value["n"], model_step=value["model_step"], metrics=metrics)


def _evaluation(value: Mapping[str, Any]) -> EvaluationFinished:
    return EvaluationFinished(time=value["time"], version=value["version"], metrics=_numbers(value["metrics"]))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    # JSON has no NaN: what was not finite is null.
    return {key: math.nan if number is None else float(number) for key, number in metrics.items()}


def _mend(directory: Path) -> None:
    """Take off the half line that a killed process may have left."""
    for name in ("events.jsonl", "metrics.jsonl"):
        path = directory / name
        if not path.exists():
            continue
        with reading(path), path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - _BLOCK_BYTES)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    end = start + newline + 1
                    break
                end = start
            file.truncate(end)


def _append(pending: Sequence[Event], *, directory: Path, epoch: float) -> None:
    with (directory / "events.jsonl").open("ab") as file:
        file.write(b"".join(encode_event(event, epoch=epoch) for event in pending))
    steps = [event for event in pending if isinstance(event, StepFinished)]
    if steps:
        with (directory / "metrics.jsonl").open("ab") as file:
            file.write(b"".join(_encode_metrics(step, epoch) for step in steps))


def _encode_metrics(step: StepFinished, epoch: float) -> bytes:
    times = {"time": step.time, "at": _wall_clock(step, epoch)}
    line = {"n": step.n, "model_step": step.model_step, **times, **step.metrics}
    return orjson.dumps(line, default=str, option=_OPTIONS)


def _wall_clock(event: Event, epoch: float) -> datetime:
    return datetime.fromtimestamp(epoch + event.time, UTC)
