"""TOML tables to dataclasses: one reader for every section of a recipe.

A table's keys are the fields of a dataclass. The reader refuses unknown keys, missing ones and values of another type,
each with its full key; the dataclass itself refuses values out of range. Nothing is converted except lists to tuples
and integers to floats: ``"5"`` and ``true`` are not numbers.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from asyncrl.errors import ConfigError
from asyncrl.plain import shown

__all__ = ["Table", "override", "parse_tables", "read_table", "require_known"]

T = TypeVar("T")
Table = Mapping[str, Any]
"""What TOML calls a table; its values are whatever the file says until they are read."""


_DEEPEST = 16
# Tables in tables: no recipe needs half of them.
_INTEGERS = range(-(2**63), 2**63)


def parse_tables(text: str) -> dict[str, Any]:
    """TOML whose values can all be shown, stored and passed on. Raises ``ConfigError`` for anything else."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is not TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"is nested too deeply: more than {_DEEPEST} tables or lists in each other") from None
    except ValueError as error:
        # Python's own: an integer of thousands of digits, a date that no calendar has.
        raise ConfigError(f"has a value that cannot be read: {error}") from error
    _require_plain(tables, ())
    return tables


def _require_plain(value: object, path: tuple[str, ...]) -> None:
    key = ".".join(path)
    if len(path) > _DEEPEST:
        raise ConfigError(f"{key}: nested too deeply: at most {_DEEPEST} tables or lists in each other")
    if isinstance(value, int) and value not in _INTEGERS:
        raise ConfigError.for_value(key, value, "an integer of 64 bits")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError.for_value(key, value, "text without the character 0")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _require_plain(inner, (*path, str(name)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _require_plain(inner, (*path, str(index)))


def read_table(kind: type[T], table: object, where: str) -> T:
    """An instance of the dataclass ``kind`` with the values of ``table``, which stands at the key ``where``.

    Raises ``ConfigError`` naming ``where.key``, the value found and what is allowed.
    """
    if not isinstance(table, Mapping):
        raise ConfigError.for_value(where, table, "a table")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    require_known(table, fields, where)
    for name, field in fields.items():
        if name not in table and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}.{name} is missing, but is required")
    hints = get_type_hints(kind)
    return kind(**{name: _read_value(hints[name], value, f"{where}.{name}") for name, value in table.items()})


def require_known(table: Table, known: Collection[str], where: str) -> None:
    """Refuse keys of ``table`` that are not in ``known``."""
    for key in table:
        if key not in known:
            raise ConfigError.for_unknown_key(key, known, where=where)


def override(tables: Table, assignment: str) -> dict[str, Any]:
    """``tables`` with ``section.key=value`` applied; the value is TOML, or a bare string if it is not.

    >>> override({"trainer": {"steps": 40}}, "trainer.steps=2")
    {'trainer': {'steps': 2}}
    """
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or not 2 <= len(keys) <= _DEEPEST or not all(keys):
        raise ConfigError.for_value("--set", assignment, "section.key=value")
    if not all(sign.isprintable() or sign.isspace() for sign in assignment):
        raise ConfigError.for_value("--set", assignment, "section.key=value in printable characters")
    return _replaced(tables, keys, _parse(text.strip(), path), path)


def _replaced(table: Table, keys: list[str], value: object, path: str) -> dict[str, Any]:
    first, *rest = keys
    if not rest:
        return {**table, first: value}
    inner = table.get(first, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"--set {path}: {first} is {shown(inner)} and no table, so it has no key {shown(rest[0])}")
    return {**table, first: _replaced(inner, rest, value, path)}


def _parse(text: str, path: str) -> object:
    try:
        tables = parse_tables(f"value = {text}")
    except ConfigError as error:
        if isinstance(error.__cause__, tomllib.TOMLDecodeError):
            return text
        raise ConfigError(f"--set {path}: {error}") from error
    # A second line would be a second value.
    return tables["value"] if len(tables) == 1 else text


def _read_value(hint: Any, value: object, key: str) -> object:
    nested = [kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind) and isinstance(kind, type)]
    if nested and (isinstance(value, Mapping) or hint is nested[0]):
        return read_table(nested[0], value, key)
    try:
        return TypeAdapter(hint).validate_python(_with_tuples(value), strict=True)
    except ValidationError as error:
        allowed = dict.fromkeys(problem["msg"].removeprefix("Input should be ") for problem in error.errors())
        raise ConfigError.for_value(key, value, " or ".join(allowed)) from None


def _with_tuples(value: object) -> object:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
