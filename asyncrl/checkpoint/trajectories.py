"""Trajectories on disk: a head as JSON, and token data in append-only shards, so that a save costs what is new.

The head has every field of ``Trajectory``, also one that is added later; those that JSON cannot hold as they are have a
line of their own in ``_READERS``.

A record of token data is a span's ids (int32) and log-probabilities (float32), or a message as JSON. It is written
once, when it is first seen, and then named by its place, which has its checksum. Shards are never changed: a process
writes shards of its own. One that no kept snapshot names is removed; one of which little is still named is given up,
one at a time, by writing that little anew. A store is used by one thread at a time, and blocks it.
"""

from __future__ import annotations

import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

import numpy as np
import orjson

from asyncrl.errors import EnvironmentFailure
from asyncrl.files import damaged, discard, numbered, reading, sync
from asyncrl.plain import copied, dumps, error_text, loads, numbers
from asyncrl.types import DropReason, Message, Row, Span, SpanKind, StopReason, ToolCall, Trajectory, TruncationCause

__all__ = ["Stored", "TokenStore", "TrajectoryReader", "frozen", "read_trajectory", "trajectory_head"]

T = TypeVar("T")
Stored: TypeAlias = Sequence[int]
"""Shard, offset, number of tokens (of a span) or bytes (of a message), and CRC-32."""
_Places: TypeAlias = dict[tuple[str, str], list[tuple[object, Stored]]]
# Trajectory and "spans" or "messages" -> those on disk. They are kept, as an id is only unique while its object lives.
_PREFIX, _SUFFIX = "tokens-", ".bin"
_SHARD_BYTES = 64 * 2**20
_LIVE_SHARE = 0.25
# Below it a shard is given up: rewriting costs at most a third of what it frees.
_TOKEN_BYTES = 4
_APART = ("row", "spans", "messages", "error", "env_state")
_NAMES = tuple(field.name for field in fields(Trajectory))
_PLAIN = tuple(name for name in _NAMES if name not in _APART)


def frozen(traj: Trajectory) -> Trajectory:
    """The trajectory as it is now, while its task goes on. Costs its number of spans and messages, not of tokens."""
    values = {name: getattr(traj, name) for name in _NAMES}
    for name, value in values.items():
        if type(value) in (list, dict) and name != "row":
            values[name] = value.copy()
    return Trajectory(**values)


def trajectory_head(traj: Trajectory) -> dict[str, Any]:
    """All of ``traj`` but its row, its messages and its tokens."""
    head: dict[str, Any] = {name: getattr(traj, name) for name in _PLAIN}
    head["metrics"] = numbers(traj.metrics)
    if traj.error is not None:
        head["error"] = error_text(traj.error)
    if traj.env_state is not None:
        head["env_state"] = orjson.Fragment(traj.env_state)
    return head


def read_trajectory(
    head: Mapping[str, Any], row: Row, spans: Sequence[Span], messages: Sequence[Message]
) -> Trajectory:
    """The trajectory whose head, row, spans and messages these are."""
    values = {name: value for name, value in head.items() if name in _NAMES}
    for name, read in _READERS.items():
        if values.get(name) is not None:
            values[name] = read(values[name])
    return Trajectory(**values, row=copied(row), spans=list(spans), messages=list(messages))


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    # JSON has no NaN: what was not finite comes back as one. What is no number at all is left out.
    return numbers({key: math.nan if value is None else value for key, value in values.items()})


_READERS: Mapping[str, Callable[[Any], object]] = {
    "stop": StopReason,
    "truncated": TruncationCause,
    "dropped": DropReason,
    "tool_calls": lambda calls: [ToolCall(**call) for call in calls],
    "tool_failures": lambda failures: [tuple(failure) for failure in failures],
    "metrics": _numbers,
    "seconds": _numbers,
    # Whatever it was, it happened in a process that is gone.
    "error": EnvironmentFailure,
    "env_state": dumps,
}


class TokenStore:
    """Owns the shards in ``folder`` that this process writes, and what is where."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shard = 0
        # The one that is being written, if ``_file`` is open.
        self._file: BinaryIO | None = None
        self._offset = 0
        self._written: _Places = {}
        self._seen: _Places = {}
        # Those of the save under way; the others are forgotten with it.
        self._live: Counter[int] = Counter()
        # Shard -> bytes that the last save named.
        self._given_up: int | None = None

    def begin(self) -> None:
        """Begin a save, of the trajectories that are ``put`` before ``end``."""
        self._seen = {}
        self._given_up = self._sparse_shard()
        self._live = Counter()

    def put(self, traj: Trajectory) -> dict[str, object]:
        """Write what is new of ``traj``; the places of its spans and messages."""
        spans = self._places((traj.id, "spans"), traj.spans, self._write_span)
        messages = self._places((traj.id, "messages"), traj.messages, self._write_message)
        for span, (shard, _, count, _) in zip(traj.spans, spans, strict=True):
            self._live[shard] += count * _TOKEN_BYTES * (1 if span.logprobs is None else 2)
        for shard, _, count, _ in messages:
            self._live[shard] += count
        return {
            "spans": [[span.kind, span.version, *place] for span, place in zip(traj.spans, spans, strict=True)],
            "messages": messages,
        }

    def _places(self, key: tuple[str, str], values: Sequence[T], write: Callable[[T], Stored]) -> list[Stored]:
        before = self._written.get(key, [])
        now = self._seen[key] = []
        for index, value in enumerate(values):
            known, place = before[index] if index < len(before) else (None, ())
            is_kept = known is value and place[0] != self._given_up
            now.append((value, place if is_kept else write(value)))
        return [place for _, place in now]

    def end(self) -> set[int]:
        """Flush the save; the shards that it names."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            if self._offset >= _SHARD_BYTES:
                self.close()
        self._written = self._seen
        return set(self._live)

    def close(self) -> None:
        """End the shard that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def abandon(self) -> None:
        """A save failed, and nobody knows how much of it was written: the next one begins a shard."""
        self._live = Counter()
        with suppress(OSError):
            self.close()
        self._file = None

    def keep_only(self, shards: Iterable[int]) -> None:
        """Remove every other shard, but for the one being written."""
        needed = {*shards, *([self._shard] if self._file is not None else [])}
        for shard in numbered(self._folder, _PREFIX, _SUFFIX):
            if shard not in needed:
                discard(_path(self._folder, shard))

    def adopt(self, traj: Trajectory, spans: Sequence[Stored], messages: Sequence[Stored]) -> None:
        """``traj`` was read from these places, where it may stay."""
        self._written[traj.id, "spans"] = list(zip(traj.spans, spans, strict=True))
        self._written[traj.id, "messages"] = list(zip(traj.messages, messages, strict=True))

    def _sparse_shard(self) -> int | None:
        """The most wasteful shard of those that are worth it."""
        shares = {
            shard: live / size
            for shard, live in self._live.items()
            if (shard != self._shard or self._file is None)
            and (size := self._size(shard))
            and live < _LIVE_SHARE * size
        }
        return min(shares, key=lambda shard: shares[shard], default=None)

    def _size(self, shard: int) -> int:
        return _path(self._folder, shard).stat().st_size

    def _write_span(self, span: Span) -> Stored:
        arrays = [span.tokens.astype("<i4", copy=False)]
        if span.logprobs is not None:
            arrays.append(span.logprobs.astype("<f4", copy=False))
        return self._append(len(span.tokens), *(np.ascontiguousarray(array).data for array in arrays))

    def _write_message(self, message: Message) -> Stored:
        data = dumps(message)
        return self._append(len(data), data)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._shard = 1 + max([self._shard, *numbered(self._folder, _PREFIX, _SUFFIX)])
            path = _path(self._folder, self._shard)
            self._file = path.open("xb")
            self._offset = 0
            sync(self._folder)
        return self._file

    def _append(self, count: int, *pieces: bytes | memoryview) -> Stored:
        file = self._opened()
        offset, checksum = self._offset, 0
        for piece in pieces:
            self._offset += file.write(piece)
            checksum = zlib.crc32(piece, checksum)
        return self._shard, offset, count, checksum


class TrajectoryReader:
    """Reads trajectories back. ``shards`` are those that hold what was read so far.

    ``CheckpointError`` for a trajectory whose token data is not there in full.
    """

    def __init__(self, folder: Path, store: TokenStore) -> None:
        self.shards: set[int] = set()
        self._folder = folder
        self._store = store
        self._data_of: dict[int, bytes] = {}

    def read(self, head: Mapping[str, Any], row: Row) -> Trajectory:
        """The trajectory of ``row`` with that head, in which ``tokens`` are the places that ``TokenStore.put`` gave."""
        spans, messages = head["tokens"]["spans"], head["tokens"]["messages"]
        traj = read_trajectory(
            head,
            row,
            [self._span(kind, version, place) for kind, version, *place in spans],
            [loads(self._data(*place)) for place in messages],
        )
        self._store.adopt(traj, [place for _, _, *place in spans], messages)
        self.shards.update(shard for _, _, shard, *_ in spans)
        self.shards.update(shard for shard, *_ in messages)
        return traj

    def _span(self, kind: str, version: int | None, place: Stored) -> Span:
        """The span at ``place``, with arrays of its own."""
        shard, offset, tokens, checksum = place
        size = tokens * _TOKEN_BYTES
        generated = kind == SpanKind.GENERATED
        data = self._data(shard, offset, size * (1 + generated), checksum)
        return Span(
            kind=SpanKind(kind),
            tokens=np.frombuffer(data[:size], dtype="<i4").astype(np.int32),
            logprobs=np.frombuffer(data[size:], dtype="<f4").astype(np.float32) if generated else None,
            version=version,
        )

    def _data(self, shard: int, offset: int, size: int, checksum: int) -> bytes:
        path = _path(self._folder, shard)
        if shard not in self._data_of:
            with reading(path):
                self._data_of[shard] = path.read_bytes()
        data = self._data_of[shard][offset : offset + size]
        if len(data) < size:
            raise damaged(path, f"it has {len(data)} of {size} bytes at offset {offset}")
        if zlib.crc32(data) != checksum:
            raise damaged(path, f"{size} bytes at offset {offset} do not fit their checksum")
        return data


def _path(folder: Path, shard: int) -> Path:
    return folder / f"{_PREFIX}{shard:06d}{_SUFFIX}"
