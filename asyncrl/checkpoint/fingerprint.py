"""What a run is, as plain values with names: a resumed run must be the same one, and the names say where it is not.

Left out is what may change without changing what is trained: the number of steps, how much is in flight, which servers
sample, what happens to failures, evaluation and logging. Code is not looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import orjson

from asyncrl.errors import ConfigError
from asyncrl.plain import jsonable
from asyncrl.types import Row

__all__ = ["described", "require_same", "rows_digest"]

_MISSING = "(not there)"
_ROW_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS


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
    """The value as it is read back from JSON."""
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
