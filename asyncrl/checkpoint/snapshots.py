"""Snapshots: what is outstanding, saved while the run goes on. The newest two are kept.

A snapshot is a file of JSON lines that name the places of their token data (``trajectories.py``): a header, a line for
each outstanding group, and an end with the checksum (``files.py``). Encoding goes group by group, so that the thread
that does it never holds the interpreter for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from asyncrl.checkpoint.state import GroupState, Renewed, RunState
from asyncrl.checkpoint.trajectories import TokenStore, TrajectoryReader, trajectory_head
from asyncrl.errors import CheckpointError, EnvironmentFailure
from asyncrl.files import LINES_END, damaged, discard, numbered, require_own, sealed, unsealed, write
from asyncrl.plain import dumps, error_text, loads
from asyncrl.rollout.progress import GroupProgress
from asyncrl.scheduling.ledger import LedgerTotals
from asyncrl.types import Group, Row, Trajectory

__all__ = ["Snapshots"]

_FORMAT = 2
_KEPT = 2
_SUFFIX = ".jsonl"
_COUNTERS = ("dropped", "dropped_members")
_PART = ("index", "seconds", "closed_by_deadline", "final", "last_member")
_PROGRESS = {"rerolls": "rerolls", "deadline_passed": "passed", "part_handed_over": "parted", "seconds": "seconds"}
# Field -> its name on disk.
_HEADER = tuple(field.name for field in fields(RunState) if field.name != "groups")


class Snapshots:
    """Owns ``folder``: snapshots and their token data. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.damage: CheckpointError | None = None
        """What is wrong with the newest snapshot, if an older one was read."""
        self._folder = folder
        self._tokens = TokenStore(folder)
        self._kept: list[tuple[int, int, set[int]]] = []
        # Number, step and shards of the snapshots that are kept, oldest first.

    def write(self, state: RunState) -> int:
        """Save ``state`` and forget all but the newest two. Returns the oldest step that a kept snapshot is after."""
        self._tokens.begin()
        number = 1 + max(self._numbers(), default=0)
        path = self._path(number)
        try:
            # The lines first: they write the token data, which has to be on disk before anything names it.
            lines = list(self._lines(state))
            shards = self._tokens.end()
        except OSError as error:
            self._tokens.abandon()
            # A full disk does not say by itself where it is.
            raise OSError(error.errno, error.strerror, str(self._folder)) from error
        except BaseException:
            self._tokens.abandon()
            raise
        write(path, sealed(lines, LINES_END))
        self._kept = [*self._kept, (number, state.n, shards)][-_KEPT:]
        oldest = self._kept[0][0]
        for other in self._numbers():
            if other < oldest:
                discard(self._path(other))
        self._tokens.keep_only(shard for _, _, used in self._kept for shard in used)
        return min(n for _, n, _ in self._kept)

    def close(self) -> None:
        """End the file that is being written."""
        self._tokens.close()

    def read(self, row: Callable[[int], Row], run: str | None = None) -> RunState | None:
        """The newest state of ``run`` that is whole; None if there is none. ``row(index)`` is that of a group."""
        failure: CheckpointError | None = None
        for number in reversed(self._numbers()):
            try:
                state, shards = self._read(self._path(number), row, run)
            except CheckpointError as error:
                failure = failure or error
                continue
            self.damage = failure
            self._kept = [(number, state.n, shards)]
            return state
        if failure is not None:
            raise failure
        return None

    def _lines(self, state: RunState) -> Iterator[bytes]:
        header = {"format": _FORMAT, **{name: getattr(state, name) for name in _HEADER}}
        yield dumps(header) + b"\n"
        for group in state.groups.values():
            yield self._line(group) + b"\n"
        yield b'{"end":%d,"crc32":"' % len(state.groups)

    def _line(self, group: GroupState) -> bytes:
        value: dict[str, object] = {"index": group.index, "due": group.due, "taken": sorted(group.taken)}
        value["parts"] = [
            {**{name: getattr(part, name) for name in _PART}, "members": self._members(part.members_G)}
            for part in group.parts
        ]
        if group.progress is not None:
            value["progress"] = self._progress(group.progress)
        if group.renewed is not None:
            value["renewed"] = group.renewed
        return dumps(value)

    def _progress(self, progress: GroupProgress) -> Mapping[str, object]:
        return {
            **{on_disk: getattr(progress, name) for name, on_disk in _PROGRESS.items()},
            "active": self._members(list(progress.active.values())),
            "ended": self._members(progress.ended),
            "left": sorted(progress.removed),
            "attempts": sorted(progress.attempts.items()),
            "retries": sorted(progress.retries.items()),
            "at_quorum": None if progress.at_quorum is None else sorted(progress.at_quorum.items()),
            "lost": None if progress.failure is None else error_text(progress.failure),
        }

    def _members(self, members: Sequence[Trajectory]) -> list[orjson.Fragment]:
        return [orjson.Fragment(dumps({**trajectory_head(traj), "tokens": self._tokens.put(traj)})) for traj in members]

    def _read(self, path: Path, row: Callable[[int], Row], run: str | None) -> tuple[RunState, set[int]]:
        data = unsealed(path, LINES_END)
        try:
            header, *lines, _ = [loads(line) for line in data.splitlines()]
            if header.pop("format") != _FORMAT:
                raise CheckpointError(f"{path} is of another release: resume it with that, or use another folder")
            require_own(path, header["run"], run)
            header["rollout_keys"] = tuple(header["rollout_keys"])
            counters = {name: Counter(header["totals"][name]) for name in _COUNTERS}
            header["totals"] = LedgerTotals(**{**header["totals"], **counters})
            reader = TrajectoryReader(self._folder, self._tokens)
            groups = {group["index"]: _read_group(group, row(group["index"]), reader) for group in lines}
            return RunState(**header, groups=groups), reader.shards
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise damaged(path, repr(error)) from error

    def _numbers(self) -> list[int]:
        return numbered(self._folder, after=_SUFFIX)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}{_SUFFIX}"


def _read_group(value: Mapping[str, Any], row: Row, trajectories: TrajectoryReader) -> GroupState:
    def members(heads: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
        return [trajectories.read(head, row) for head in heads]

    progress, renewed = value.get("progress"), value.get("renewed")
    return GroupState(
        index=value["index"],
        due=value["due"],
        taken=set(value["taken"]),
        parts=[
            Group(**{name: part[name] for name in _PART}, row=row, members_G=members(part["members"]))
            for part in value["parts"]
        ],
        progress=None if progress is None else _read_progress(progress, members),
        renewed=None if renewed is None else Renewed.read(renewed),
    )


def _read_progress(
    value: Mapping[str, Any], members: Callable[[Sequence[Mapping[str, Any]]], list[Trajectory]]
) -> GroupProgress:
    quorum = value["at_quorum"]
    return GroupProgress(
        **{name: value[on_disk] for name, on_disk in _PROGRESS.items()},
        active={traj.member: traj for traj in members(value["active"])},
        ended=members(value["ended"]),
        removed=set(value["left"]),
        attempts=Counter(dict(value["attempts"])),
        retries=Counter(dict(value["retries"])),
        at_quorum=None if quorum is None else dict(quorum),
        failure=None if value["lost"] is None else EnvironmentFailure(value["lost"]),
    )
