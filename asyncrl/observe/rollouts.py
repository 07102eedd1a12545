"""The folder ``rollouts`` of a run directory: what was said in each step and evaluation.

``step-000007.jsonl`` is about step 7, ``eval-000012-heldout.jsonl`` about the evaluation that followed step 12. Each
line is one trajectory::

    n, version        the step, or the one before the evaluation; the version that was committed meanwhile
    evaluation        its name, "" for a step
    group, member, attempt, id, best, worst      which trajectory it is, and whether it is an extreme of its group
    reward, metrics, truncated, dropped, error, where, turns, generated_tokens, context_tokens, seconds
                      as ``Trajectory`` has them; ``where`` is the user's line that raised ``error``
    segments          of each that was sampled its version, tokens, and age when it was trained (null in evaluations)
    row, messages     what was asked, and all that was said, with tool calls as they were read
    tokens, logprobs  on request, null where nothing was sampled
    shortened         true if parts of the line were left out to keep the bound on bytes

A last line ``{"left_out": trajectories, "shortened": trajectories, "bytes": missing}`` stands in files that would have
been too long. A file is whole or not there, and a step that is done again after a resume replaces its file.

Encoding and writing happen in a worker thread; the event loop only hands the trajectories over.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncrl.events import Event, Events, Notice, RolloutsFinished
from asyncrl.files import reading, sweep, write
from asyncrl.observe.kept import KeptRollouts
from asyncrl.observe.rolloutlines import encode_rollouts

__all__ = ["RolloutFile", "RolloutWriter", "read_rollouts", "rollout_files", "write_rollouts"]

_FOLDER = "rollouts"
_PENDING = 16
# Batches that are not written yet: they are in memory. A disk that is so far behind is slower than the run.
_NAME = re.compile(r"(?:step-(\d{6,18})|eval-(\d{6,18})-(\w+))\.jsonl", re.ASCII)


class RolloutWriter:
    """Hands trajectories to the thread that writes them. ``lost`` counts the batches beyond the bound."""

    def __init__(self, events: Events, stream: MemoryObjectSendStream[RolloutsFinished]) -> None:
        self._events = events
        self._stream = stream
        self.lost = 0

    def observe(self, event: Event) -> None:
        """Queue the trajectories of ``event`` for writing; never waits."""
        if not isinstance(event, RolloutsFinished):
            return
        try:
            self._stream.send_nowait(event)
        except anyio.WouldBlock:
            self.lost += 1
            keys = {"n": event.n, "hint": "the disk is slower than the run: set run.rollouts to a small number"}
            notice = Notice(time=anyio.current_time(), name="rollouts_lost", level="warning", keys=keys)
            self._events.emit(notice)
        except anyio.BrokenResourceError:
            self.lost += 1  # the writer failed, and its error is already ending the run


@asynccontextmanager
async def write_rollouts(
    directory: Path, events: Events, options: KeptRollouts | None = None
) -> AsyncGenerator[RolloutWriter]:
    """Keep trajectories of the block's steps and evaluations in ``directory``; on leaving it, they are on disk.

    ``options``: which of them, by default the best and the worst of each group. A write that fails ends the block with
    its ``OSError``, in an exception group.
    """
    options = options or KeptRollouts()
    folder = directory / _FOLDER
    send, receive = anyio.create_memory_object_stream[RolloutsFinished](_PENDING)
    writer = RolloutWriter(events, send)
    with send, receive:
        if options.rollouts == "none":
            yield writer
            return
        await anyio.to_thread.run_sync(_prepare, folder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_write, receive, folder, options)
            unsubscribe = events.subscribe(writer.observe, kinds=(RolloutsFinished,))
            try:
                yield writer
            finally:
                unsubscribe()
                send.close()


async def _write(receive: MemoryObjectReceiveStream[RolloutsFinished], folder: Path, options: KeptRollouts) -> None:
    # Shielded: the last trajectories of a run that is cancelled or fails are the ones to look at.
    with anyio.CancelScope(shield=True), receive:
        async for event in receive:
            await anyio.to_thread.run_sync(_write_file, event, folder, options)
            del event  # the wait for the next one keeps no trajectory


def _prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)


def _write_file(event: RolloutsFinished, folder: Path, options: KeptRollouts) -> None:
    name = f"step-{event.n:06d}.jsonl"
    if event.evaluation:
        name = f"eval-{event.n:06d}-{re.sub(r'[^a-zA-Z0-9_]', '_', event.evaluation)}.jsonl"
    write(folder / name, encode_rollouts(event, options))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFile:
    """What is kept of a step or an evaluation. Each of ``trajectories`` is a line as in the example above."""

    path: Path
    n: int
    evaluation: str
    """Its name; empty for a step."""
    trajectories: list[dict[str, Any]]
    left_out: int
    """Trajectories that had no room, of those that were to be kept."""
    unreadable: int
    """Lines that are damaged."""


def rollout_files(directory: Path) -> list[tuple[int, str, Path]]:
    """Number, evaluation ("" for a step) and path of all files of the run in ``directory``, in order. Blocking."""
    folder = directory / _FOLDER
    if not folder.is_dir():
        return []
    with reading(folder):
        found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1] or match[2]), match[3] or "", path) for match, path in found)


def read_rollouts(directory: Path, *, step: int | None = None, evaluation: str | None = None) -> Iterator[RolloutFile]:
    """What the run in ``directory`` has kept, in order, one file after the other. Blocking.

    ``step``: only of it, and of evaluations that followed it. ``evaluation``: only of that name, "" for steps only.
    """
    for n, name, path in rollout_files(directory):
        if step in (None, n) and evaluation in (None, name):
            yield _read(path, n, name)


def _read(path: Path, n: int, evaluation: str) -> RolloutFile:
    trajectories: list[dict[str, Any]] = []
    left_out = unreadable = 0
    with reading(path):
        lines = path.read_bytes().splitlines()
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if _is_trajectory(value):
            trajectories.append(value)
        elif isinstance(value, dict) and isinstance(value.get("left_out"), int):
            left_out = value["left_out"]
        else:
            unreadable += 1
    return RolloutFile(
        path=path,
        n=n,
        evaluation=evaluation,
        trajectories=trajectories,
        left_out=left_out,
        unreadable=unreadable,
    )


def _is_trajectory(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("group"), int)
        and isinstance(value.get("member"), int)
        and isinstance(value.get("messages"), list)
        and all(isinstance(message, dict) for message in value["messages"])
    )
