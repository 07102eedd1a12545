"""Values of other libraries as plain Python: numbers, text, JSON, and copies of rows. Pure functions.

Users and models write what they like; what goes on from here is a float, valid Unicode, or what JSON has. What is
refused, and whose fault that is, is decided by the callers.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from numbers import Real
from types import NoneType
from typing import Any, TypeVar

import orjson

__all__ = [
    "are_plain",
    "copied",
    "dumps",
    "error_text",
    "jsonable",
    "loads",
    "metric",
    "number",
    "numbers",
    "shortened",
    "shown",
    "text",
    "uncopyable_parts",
]

T = TypeVar("T")
_SHOWN = 120
_ERROR = 2000
# Characters of an error: what it says in the beginning and in the end is enough.
_DEEPEST = 100
# Levels of nesting; JSON of other programs ends at 128 or more.
_LARGEST = 10**4000
# Python writes no integer of more than 4,300 digits as text.
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_IMMUTABLE = frozenset((str, int, float, bool, bytes, complex, NoneType))


def number(value: object) -> float:
    """One number as a float: of Python, numpy, torch, ``decimal`` or ``fractions``, also alone in an array or tensor.

    True is 1. Raises ``TypeError`` for anything else, text included, and for what a float cannot hold.
    """
    if isinstance(value, float):
        return float(value)
    try:
        if isinstance(value, int):
            return float(value)
        found = value.item() if not isinstance(value, str) and hasattr(value, "item") else value
        if isinstance(found, Real | Decimal):
            return float(found)
    except Exception as error:
        raise TypeError(f"{shown(value)} is not a number that a float can hold: {error}") from error
    raise TypeError(f"{shown(value)} is not a number")


def metric(value: object) -> float:
    """A number to be summed: infinities are NaN, because no sum is left of them. Raises as ``number`` does."""
    found = value if type(value) is float else number(value)
    return math.nan if math.isinf(found) else found


def are_plain(metrics: Mapping[object, object]) -> bool:
    """True if every value is a finite float and every key ASCII text. Looked at after each call of an environment."""
    for key, value in metrics.items():
        # What is not finite differs from itself by NaN.
        if type(value) is not float or value - value != 0.0 or type(key) is not str or not key.isascii():
            return False
    return True


def numbers(values: object) -> dict[str, float]:
    """The metrics among ``values``; what is none, or has no name, is left out."""
    if type(values) is dict and are_plain(values):
        return values.copy()
    found: dict[str, float] = {}
    for key, value in values.items() if isinstance(values, dict) else ():
        name = text(key) if isinstance(key, str) else shown(key)
        try:
            found[name] = metric(value)
        except TypeError:
            continue
    return found


def text(value: str) -> str:
    """Valid Unicode of type ``str``. A surrogate that stands alone becomes U+FFFD, two that belong together become one.

    They come from file names and output of other programs, and no tokenizer, file or JSON takes them.
    """
    if value.isascii():
        return value if type(value) is str else str.__str__(value)
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value if type(value) is str else str.__str__(value)


def shown(value: object) -> str:
    """``value`` for a message to a person: short, valid Unicode, whatever it is."""
    try:
        written = repr(value)
    except Exception:  # noqa: BLE001  a repr of anybody's
        written = f"<{type(value).__name__}>"
    return text(written if len(written) <= _SHOWN else f"{written[:_SHOWN]}.. ({type(value).__name__})")


def shortened(value: str, limit: int) -> str:
    """At most ``limit`` characters of ``value``, and a mark of its own length where the middle was."""
    if len(value) <= limit:
        return value
    tail = limit // 4
    return f"{value[: limit - tail]}\n[{len(value) - limit} characters left out]\n{value[len(value) - tail :]}"


def error_text(error: BaseException | None) -> str:
    """The error's kind and what it says: valid Unicode, and never long."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  an error of anybody's
        said = "(it cannot say why)"
    return text(shortened(f"{type(error).__name__}: {said}", _ERROR))


def jsonable(value: object, odd: Callable[[str, object], object] | None = None) -> Any:
    """``value`` as JSON has it, in new containers, with all text valid. Numbers of numpy and torch become Python's.

    ``odd(path, value)`` says what stands for anything that JSON does not have, or raises; by default its text does.
    """
    return _jsonable(value, odd or (lambda path, value: shown(value)), "", ())


def _jsonable(value: object, odd: Callable[[str, object], object], path: str, around: tuple[int, ...]) -> Any:
    """``around``: the ids of the containers that ``value`` is in."""
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, Mapping | list | tuple):
        return _scalar(value, odd, path, around)
    if len(around) == _DEEPEST or id(value) in around:
        return odd(path, value)
    inside = (*around, id(value))
    if isinstance(value, Mapping):
        named = ((key if isinstance(key, str) else str(odd(f"{path}[key]", key)), item) for key, item in value.items())
        return {text(key): _jsonable(item, odd, f"{path}[{shown(key)}]", inside) for key, item in named}
    return [_jsonable(item, odd, f"{path}[{index}]", inside) for index, item in enumerate(value)]


def _scalar(value: object, odd: Callable[[str, object], object], path: str, around: tuple[int, ...]) -> Any:
    """A number or text of any library; also an array or tensor, which is a list."""
    try:
        found = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(found, bool | str) or (type(found) is int and -_LARGEST < found < _LARGEST):
            return found
        written = math.nan if isinstance(found, list) else number(found)
    except Exception:  # noqa: BLE001  whatever an object of anybody's raises, it is not JSON
        return odd(path, value)
    if isinstance(found, list):
        return _jsonable(found, odd, path, around)
    return written if math.isfinite(written) else None


def dumps(value: object) -> bytes:
    """``value`` as JSON. What JSON does not have is written as text that describes it: what is saved must be readable,
    whatever an environment does to its messages while it runs.
    """
    return _dumps(value, ())


def _dumps(value: object, around: tuple[int, ...]) -> bytes:
    """``around``: the ids of the dicts that ``value`` is in."""
    try:
        return orjson.dumps(value, option=_JSON_OPTIONS)
    except TypeError:
        if not isinstance(value, dict) or id(value) in around or len(around) == _DEEPEST:
            return json.dumps(jsonable(value, _described), separators=(",", ":")).encode()
    # Only what is odd takes the long way, and what is JSON already stays.
    inside = (*around, id(value))
    parts = {text(str(key)): item for key, item in value.items()}
    return orjson.dumps(
        {
            key: item if isinstance(item, orjson.Fragment) else orjson.Fragment(_dumps(item, inside))
            for key, item in parts.items()
        }
    )


def loads(data: bytes) -> Any:
    """What ``dumps`` wrote, integers of any size too."""
    return json.loads(data)


def _described(path: str, value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable({field.name: getattr(value, field.name) for field in fields(value)})
    return shown(value)


def copied(row: T) -> T:
    """A copy that shares nothing which can be changed, but for what cannot be copied (see ``uncopyable_parts``)."""
    if type(row) in _IMMUTABLE:
        return row
    try:
        made: T = _copied(row)
        return made
    except RecursionError:
        return row


def _copied(value: Any) -> Any:
    # A tenth of what ``copy.deepcopy`` takes for plain data, which rows nearly always are.
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: item if type(item) in _IMMUTABLE else _copied(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _IMMUTABLE else _copied(item) for item in value]
    if kind is tuple:
        return tuple([_copied(item) for item in value])
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise
    except Exception:  # noqa: BLE001  a lock, a connection, a generator: each says so in its own way
        return value


def uncopyable_parts(row: object) -> list[str]:
    """Names of the parts of ``row`` that cannot be copied: ``row['lock'] (lock)``."""
    found: list[str] = []

    def look(value: object, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                look(item, f"{path}[{shown(key)}]")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                look(item, f"{path}[{index}]")
        elif type(value) not in _IMMUTABLE:
            try:
                copy.deepcopy(value)
            except Exception:  # noqa: BLE001  see _copied
                found.append(f"{path} ({type(value).__name__})")

    try:
        look(row, "row")
    except RecursionError:
        return ["row (it is nested too deeply, or contains itself)"]
    return found
