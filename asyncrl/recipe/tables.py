"""TOML tables to keyword arguments: one reader for every section of a recipe.

A table's keys are the parameters of a function or class, as far as TOML can say their values: an option that is added
there is a key here. The reader refuses unknown keys, missing ones and values of another type, each with its full key;
what is called with them refuses values out of range. Nothing is converted except lists to tuples, integers to floats
and texts to paths: ``"5"`` and ``true`` are not numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from asyncrl.errors import ConfigError
from asyncrl.plain import shown

__all__ = ["Key", "Table", "keys_of", "override", "parse_tables", "read_keywords", "read_table", "require_known"]

T = TypeVar("T")
Table = Mapping[str, Any]
"""What TOML calls a table; its values are whatever the file says until they are read."""

_CONTAINERS = (Literal, tuple, Mapping)
_PATH = Annotated[str, AfterValidator(lambda text: Path(text))]  # noqa: PLW0108  a class without a signature
_PLAIN = (str, int, float, bool, Any, _PATH)
_OFF = "off"
_UNSET = object()
# What is set to nothing is left out.

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


class Key(NamedTuple):
    """What may stand at a key of a table: values of the type ``plain``, or tables whose keys are those of ``table``.

    ``default``: ``inspect.Parameter.empty`` if the key is required. ``off``: "off" stands for None, which TOML cannot
    say. ``owner`` calls it ``name`` and has its documentation.
    """

    default: Any
    plain: Any
    table: type | None = None
    off: bool = False
    owner: Callable[..., object] | None = None
    name: str = ""


def keys_of(function: Callable[..., object], *, without: Collection[str] = ()) -> dict[str, Key]:
    """The parameters of ``function``, a class included, whose values TOML can say, but for those in ``without``.

    Of a union its plain types and dataclasses are left; objects of other classes cannot be written in a file.
    """
    hints = get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    keys: dict[str, Key] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in without:
            continue
        hint, default = hints[name], parameter.default
        kinds = list(map(_as_in_files, get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)))
        plain = [kind for kind in kinds if kind in _PLAIN or get_origin(kind) in _CONTAINERS]
        table = next((kind for kind in kinds if dataclasses.is_dataclass(kind) and isinstance(kind, type)), None)
        if plain or table:
            off = NoneType in kinds and default not in (None, inspect.Parameter.empty)
            said = [*plain, Literal[_OFF]] if off else plain
            keys[name] = Key(default, reduce(operator.or_, said) if said else None, table, off, function, name)
    return keys


def _as_in_files(kind: Any) -> Any:
    """Paths are texts there, and sequences are lists."""
    if get_origin(kind) is Sequence:
        return GenericAlias(tuple, (*get_args(kind), ...))
    return _PATH if kind is Path else kind


def read_keywords(keys: Mapping[str, Key], table: object, where: str) -> dict[str, Any]:
    """The values of all ``keys``, those of ``table`` or their defaults. The table stands at the key ``where``.

    Raises ``ConfigError`` naming ``where.key``, the value found and what is allowed.
    """
    if not isinstance(table, Mapping):
        raise ConfigError.for_value(where, table, "a table")
    require_known(table, keys, where)
    for name, key in keys.items():
        if name not in table and key.default is inspect.Parameter.empty:
            raise ConfigError(f"{where}.{name} is missing, but is required")
    given = {name: _read_value(keys[name], value, f"{where}.{name}") for name, value in table.items()}
    return {name: key.default for name, key in keys.items()} | given


def read_table(kind: type[T], table: object, where: str) -> T:
    """What ``kind`` makes of ``table`` at the key ``where``. Raises ``ConfigError`` as ``read_keywords`` does."""
    return kind(**read_keywords(keys_of(kind), table, where))


def require_known(table: Table, known: Collection[str], where: str) -> None:
    """Refuse keys of ``table`` that are not in ``known``."""
    for key in table:
        if key not in known:
            raise ConfigError.for_unknown_key(key, known, where=where)


def override(tables: Table, assignment: str) -> dict[str, Any]:
    """``tables`` with ``section.key=value`` applied; the value is TOML, or a bare string if it is not.

    Without a value the key is left out, as if the file did not have it: its default counts.

    >>> override({"trainer": {"steps": 40}}, "trainer.steps=2")
    {'trainer': {'steps': 2}}
    >>> override({"trainer": {"steps": 40, "loss": "ppo"}}, "trainer.loss=")
    {'trainer': {'steps': 40}}
    """
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or not 2 <= len(keys) <= _DEEPEST or not all(keys):
        raise ConfigError.for_value("--set", assignment, "section.key=value")
    if not all(sign.isprintable() or sign.isspace() for sign in assignment):
        raise ConfigError.for_value("--set", assignment, "section.key=value in printable characters")
    text = text.strip()
    return _replaced(tables, keys, _parse(text, path) if text else _UNSET, path)


def _replaced(table: Table, keys: list[str], value: object, path: str) -> dict[str, Any]:
    first, *rest = keys
    if not rest:
        others = {key: other for key, other in table.items() if key != first}
        return others if value is _UNSET else {**table, first: value}
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


def _read_value(key: Key, value: object, where: str) -> object:
    if key.table is not None and (key.plain is None or isinstance(value, Mapping)):
        return read_table(key.table, value, where)
    try:
        adapter = TypeAdapter(key.plain, config=ConfigDict(strict=True))
        read = adapter.validate_python(_with_tuples(value))
    except ValidationError as error:
        allowed = dict.fromkeys(problem["msg"].removeprefix("Input should be ") for problem in error.errors())
        tables = ["a table"] if key.table else []
        raise ConfigError.for_value(where, value, " or ".join([*allowed, *tables])) from None
    return None if key.off and read == _OFF else read


def _with_tuples(value: object) -> object:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
