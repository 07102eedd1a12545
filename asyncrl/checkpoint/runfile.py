"""``run.json``: which run a directory is of, and whether it has begun; the configuration, for people. Blocking.

A resumed run must be the same one. What a run is, is kept as plain values with names, and the names say where it is
not the same. Left out is what may change without changing what is trained: the number of steps, how much is in flight,
which servers sample, what happens to failures, evaluation and logging. Code is not looked at. Of what other files say
about the run, only the number of its last step is looked at here: a step that was told is not to be made again without
a word.
"""

from __future__ import annotations

import hashlib
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.files import read_json, write_json
from asyncrl.plain import jsonable
from asyncrl.types import Row

__all__ = ["RunFile", "described", "rows_digest", "write_configuration"]

_NAME = "run.json"
_WAY_OUT = "put back a copy of what is missing, or use another folder"
_LIBRARIES = ("asyncrl", "torch", "transformers", "peft", "anyio", "httpx")
_MISSING = "(not there)"
_ROW_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS


class RunFile:
    """Owns ``directory/run.json``, but for the configuration in it."""

    def __init__(self, directory: Path) -> None:
        self.steps_before: int | None = None
        """Of which length the run was to be so far; None if it is new."""
        self.run = uuid.uuid4().hex
        """Which run this is, by a name that no other has; of a directory with state, known once that was checked."""
        self._directory = directory
        self._path = directory / _NAME
        self._content: dict[str, Any] = {}

    def read(self) -> None:
        """Read what the file says. ``CheckpointError`` if it is damaged."""
        self._content = read_json(self._path) if self._path.exists() else {}
        self.run = self._content.get("run", self.run)

    @property
    def known(self) -> bool:
        """True if the file was there and said which run this is."""
        return "run" in self._content

    def check(self, plan: Mapping[str, Any], *, exists: bool) -> bool:
        """Compare ``plan`` with that of the run in the directory; ``exists``: there is state of one.

        False if there is none, and what is there of one that has done nothing is not of this run. Raises
        ``ConfigError`` with each difference, ``CheckpointError`` if what the file needs is missing.
        """
        if exists:
            if "plan" not in self._content:
                raise CheckpointError(
                    f"{self._path} is missing or does not say which run this is, but {self._directory} has the state "
                    f"of one: nobody can tell whether it is the same; {_WAY_OUT}"
                )
            require_same(self._content["plan"], plan, str(self._directory))
            self.steps_before = self._content["steps"]
            return True
        if self._content.get("begun"):
            raise CheckpointError(
                f"{self._path} is of a run that has committed steps, but there are none in state, weights and journal "
                f"beside it; {_WAY_OUT}"
            )
        return bool(self._content.get("plan") == plan)

    def require_told(self, n: int, told: tuple[Path, int] | None) -> None:
        """Raise ``CheckpointError`` if ``told``, a file and the last step in it, is after ``n``."""
        if told is not None and told[1] > n:
            path, step = told
            raise CheckpointError(
                f"{path} has step {step}, but state and journal beside it end with step {n}; {_WAY_OUT}; to make the "
                f"steps after {n} once more, move {path.name} away"
            )

    def write(self, plan: Mapping[str, Any], steps: int) -> None:
        """This is the run, and how long it is to be."""
        self._content |= {"run": self.run, "plan": plan, "steps": steps}
        write_json(self._path, self._content)

    def begin(self) -> None:
        """A step was committed."""
        if not self._content.get("begun"):
            self._content["begun"] = True
            write_json(self._path, self._content)


def write_configuration(directory: Path, configuration: Mapping[str, object]) -> None:
    """Begin the file of a new run: its configuration, when it started and with which versions. Whole or not at all."""
    content = {
        "configuration": configuration,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
    }
    write_json(directory / _NAME, content)


def described(values: Mapping[str, object]) -> dict[str, Any]:
    """Each value under its name; a dataclass as its fields, ``optimizer.lr``. Plain JSON."""
    return dict(_flat(values))


def rows_digest(rows: Sequence[Row]) -> str:
    """Changes if a row does, or their order. What is neither plain data nor an array counts by its type only."""
    digest = hashlib.sha256()
    for row in rows:
        try:
            digest.update(orjson.dumps(row, default=_kind, option=_ROW_OPTIONS))
        except TypeError:  # large integers, other keys than text, text that is not Unicode, deep nesting
            for part in _written(row):
                digest.update(part)
    return f"{len(rows)} rows, sha256 {digest.hexdigest()[:16]}"


def require_same(saved: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    """Raise ``ConfigError`` naming each field that differs and both of its values."""
    names = [name for name in {**saved, **found} if saved.get(name, _MISSING) != found.get(name, _MISSING)]
    if names:
        changes = "; ".join(
            f"{name} is {found.get(name, _MISSING)!r}, but was {saved.get(name, _MISSING)!r}" for name in names
        )
        raise ConfigError(
            f"{where} has the state of another run: {changes}. Set that back to resume it, or use another folder"
        )


def _flat(values: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if is_dataclass(value) and not isinstance(value, type):
            yield name, type(value).__name__
            inner = {f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)}
            yield from _flat(inner)
        else:
            yield name, _plain(value)


def _plain(value: object) -> Any:
    """As it is once it went through JSON."""
    try:
        return orjson.loads(orjson.dumps(value, default=_kind, option=_ROW_OPTIONS))
    except TypeError:
        return jsonable(value)


def _written(row: Row) -> Iterator[bytes]:
    """Any value as bytes, however deep; the same for the same value, in every process."""
    within: set[int] = set()
    stack: list[tuple[object, bool]] = [(row, False)]
    while stack:
        value, is_end = stack.pop()
        if is_end:
            within.discard(id(value))
            yield b")"
        elif isinstance(value, dict | list | tuple) and id(value) not in within:
            within.add(id(value))
            stack.append((value, True))
            items = _sorted_items(value) if isinstance(value, dict) else value
            stack.extend((item, False) for item in reversed(items))
            yield f"{type(value).__name__}{len(value)}(".encode()
        elif isinstance(value, str):
            yield value.encode("utf-8", "surrogatepass") + b"\0"
        elif isinstance(value, int):
            yield f"{value:x}\0".encode()
        elif value is None or isinstance(value, float | bytes):
            yield repr(value).encode() + b"\0"
        elif hasattr(value, "tolist"):
            stack.append((value.tolist(), False))
        else:
            yield _kind(value).encode() + b"\0"


def _sorted_items(value: dict[Any, Any]) -> list[tuple[bytes, object]]:
    named = ((b"".join(_written(key)), item) for key, item in value.items())
    return sorted(named, key=lambda pair: pair[0])


def _kind(value: object) -> str:
    if isinstance(value, partial):
        options = ", ".join(f"{key}={option!r}" for key, option in sorted(value.keywords.items()))
        return f"{_kind(value.func)}({options})"
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return str(getattr(named, "__qualname__", named))
