"""The journal: one file for each trainer step, with everything that the step was made from.

A step is committed when its file has its name. The file has the sequences, each once, and for each update of the step
the passes in which they were trained and in which order, so that repeating the step gives the same parameters to the
last bit. All updates of a step are in one file: they happen together or not at all. The file says which groups the step
consumed, so that none of them is trained again, and what else freed the barrier before the step: the groups that were
given up, and those that began anew. Without these an older snapshot would bring back samples that are too old by now.
A step without gradient has an entry too. Files are safetensors: arrays over all sequences, one after the other, and the
rest as JSON in the header; the last array is the checksum (``files.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import safetensors.numpy

from asyncrl.checkpoint.state import Consumed, JournalEntry, Renewed
from asyncrl.errors import CheckpointError
from asyncrl.files import (
    DIGITS,
    damaged,
    discard,
    draft,
    drafted,
    numbered,
    require_own,
    sealed,
    settle,
    sync,
    unsealed,
)
from asyncrl.learning.base import OptimizerSettings, TrainingSequence, Update, distinct_sequences

__all__ = ["Journal"]

_FORMAT = "3"
_NUMBERS = ("advantage", "weight", "temperature")
# Of a sequence; and its arrays.
_ARRAYS = {"tokens": "<i4", "logprobs": "<f4", "ages": "<i4", "mask": "|b1"}
_TYPES = {"<i8": "I64", "<f8": "F64", "<i4": "I32", "<f4": "F32", "|b1": "BOOL", "|u1": "U8"}
_SUFFIX = ".safetensors"
_HEAD = tuple(field.name for field in fields(JournalEntry) if field.name != "updates")


class Journal:
    """Owns ``folder`` with one file for each step, and ``refused`` for batches that gave no usable gradient."""

    def __init__(self, folder: Path, refused: Path) -> None:
        self._folder = folder
        self._refused = refused

    def draft(self, entry: JournalEntry) -> None:
        """Write the entry and flush it, under a name that does not count yet."""
        draft(self.path(entry.n), sealed(_encode(entry)))

    def commit(self, n: int) -> None:
        """The drafted step has happened."""
        path = self.path(n)
        settle(drafted(path), path)

    def refuse(self, n: int) -> Path:
        """The drafted step cannot happen: keep its batch for inspection, and say where."""
        self._refused.mkdir(exist_ok=True)
        path = self._refused / self.path(n).name
        settle(drafted(self.path(n)), path)
        return path

    def steps(self) -> list[int]:
        """The steps that are there, in order."""
        return numbered(self._folder, after=_SUFFIX)

    def read(self, n: int, *, sequences: bool = True, run: str | None = None) -> JournalEntry:
        """The entry of step ``n`` of ``run``; without ``sequences`` only what it says of groups and versions."""
        path = self.path(n)
        data = unsealed(path)
        try:
            entry = _decode(path, data, sequences=sequences)
        except (KeyError, ValueError, TypeError) as error:
            raise damaged(path, f"{type(error).__name__}: {error}") from error
        require_own(path, entry.run, run)
        if entry.n != n:
            raise CheckpointError(f"{path} is the entry of step {entry.n}: put back that of step {n}")
        return entry

    def forget(self, n: int) -> None:
        """Remove the steps up to ``n``."""
        for step in self.steps():
            if step <= n:
                discard(self.path(step))
        sync(self._folder)

    def path(self, n: int) -> Path:
        """The file of step ``n``."""
        return self._folder / f"{n:06d}{_SUFFIX}"


def _encode(entry: JournalEntry) -> Iterator[bytes | memoryview]:
    """The file in pieces: one sequence at a time, so that millions of tokens are neither copied nor held for long."""
    sequences = distinct_sequences(entry.updates)
    places = {id(sequence): place for place, sequence in enumerate(sequences)}
    updates = [
        {
            "divisor": update.divisor,
            "settings": update.settings,
            "chunks": [[places[id(sequence)] for sequence in chunk] for chunk in update.chunks],
        }
        for update in entry.updates
    ]
    tokens = sum(len(sequence.tokens) for sequence in sequences)
    numbers = {"lengths": np.array([len(sequence.tokens) for sequence in sequences], dtype="<i8")}
    for name in _NUMBERS:
        numbers[name] = np.array([getattr(sequence, name) for sequence in sequences], dtype="<f8")
    shapes = [(name, array.dtype, len(sequences)) for name, array in numbers.items()]
    shapes += [(name, np.dtype(kind), tokens) for name, kind in _ARRAYS.items()]
    shapes.append(("crc32", np.dtype("|u1"), DIGITS))
    head = {**{name: getattr(entry, name) for name in _HEAD}, "updates": updates}
    yield _header(shapes, {"format": _FORMAT, "entry": orjson.dumps(head).decode()})
    for array in numbers.values():
        yield array.tobytes()
    for name, kind in _ARRAYS.items():
        for sequence in sequences:
            yield np.ascontiguousarray(getattr(sequence, name), dtype=kind).data


def _header(shapes: Sequence[tuple[str, np.dtype[Any], int]], metadata: Mapping[str, str]) -> bytes:
    """Of a safetensors file with these one-dimensional arrays: name, type, length; the widest first."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, kind, length in shapes:
        start, end = end, end + kind.itemsize * length
        header[name] = {"dtype": _TYPES[kind.str], "shape": [length], "data_offsets": [start, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _decode(path: Path, data: bytes, *, sequences: bool) -> JournalEntry:
    length = int.from_bytes(data[:8], "little")
    metadata = orjson.loads(data[8 : 8 + length])["__metadata__"]
    if metadata["format"] != _FORMAT:
        raise CheckpointError(
            f"{path} is of format {metadata['format']!r}, which another release of asyncrl wrote; this one reads "
            f"{_FORMAT!r}: go on with that release, or begin the run anew in another folder"
        )
    head = orjson.loads(metadata["entry"])
    every = list(_sequences(safetensors.numpy.load(data))) if sequences else []
    values = {
        "consumed": tuple(Consumed(**{**one, "members": tuple(one["members"])}) for one in head["consumed"]),
        "dropped": tuple((group, reason) for group, reason in head["dropped"]),
        "renewed": tuple(Renewed.read(one) for one in head.get("renewed", ())),
        "updates": [_update(one, every) for one in head["updates"]],
    }
    return JournalEntry(**{**head, **values})


def _update(head: Mapping[str, Any], sequences: Sequence[TrainingSequence]) -> Update:
    """The update of that ``head``, without its passes if the ``sequences`` were not read."""
    settings = head["settings"]
    return Update(
        chunks=[[sequences[place] for place in chunk] for chunk in head["chunks"]] if sequences else [],
        divisor=head["divisor"],
        settings=None if settings is None else OptimizerSettings(**settings),
    )


def _sequences(arrays: dict[str, np.ndarray[Any, Any]]) -> Iterator[TrainingSequence]:
    end = 0
    for index, length in enumerate(arrays["lengths"].tolist()):
        start, end = end, end + length
        values: dict[str, Any] = {name: arrays[name][start:end] for name in _ARRAYS}
        values |= {name: float(arrays[name][index]) for name in _NUMBERS}
        yield TrainingSequence(**values)
