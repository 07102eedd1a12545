"""Values as JSON and arrays: the arguments and results of a learner's methods, losses among them.

What can travel: None, booleans, numbers, texts, paths, numpy arrays, lists, tuples and mappings with text keys of such
values, training sequences, and frozen dataclasses whose fields can travel. Such an object travels as the name of its
class and its fields; the other side imports the class by that name and calls it. Anything else is refused, by the path
to it and with what to do.

Example: ``CISPO(eps_max=4.0)`` is ``{"$": "object", "class": "asyncrl.learning.losses:CISPO", "file": "..",
"value": {"eps_max": 4.0}}``. ``$`` marks what is not itself.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.ranks.frames import Arrays
from asyncrl.modules import import_named
from asyncrl.plain import shown

__all__ = ["any_class", "own_class", "pack", "unpack"]

_Finder: TypeAlias = Callable[[str, str | None], Any]
_OWN = "asyncrl."


def pack(where: str, value: object) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """``value`` as JSON, and the arrays that it mentions; ``where`` names it in errors. Raises ``ConfigError``.

    For a mapping without a name of its own ``where`` is "": its items are named by their keys.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    return _packed(where, value, arrays), arrays


def unpack(value: Any, arrays: Arrays, find: _Finder) -> Any:
    """What ``pack`` was given; ``find`` gives the class of a name and a file. Arrays are as they came, maybe shared."""
    inside = partial(unpack, arrays=arrays, find=find)
    if isinstance(value, list):
        return [inside(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value["$"] == "object":
        return find(value["class"], value["file"])(**{key: inside(item) for key, item in value["value"].items()})
    made: Mapping[str, Callable[[Any], Any]] = {
        "map": lambda items: {key: inside(item) for key, item in items.items()},
        "tuple": lambda items: tuple(inside(item) for item in items),
        "sequences": partial(_unpacked_sequences, arrays=arrays),
        "array": arrays.__getitem__,
        "path": Path,
        "float": float,
    }
    return made[value["$"]](value["value"])


def own_class(name: str, file: str | None) -> Any:
    """A class of asyncrl itself, which is all that a driver takes from its ranks. Raises ``LearnerError``."""
    if not name.startswith(_OWN):
        raise LearnerError(f"the ranks answered with {name}, which is no class of asyncrl")
    return any_class(name, None)


def any_class(name: str, file: str | None) -> Any:
    """The dataclass ``module:Class``, imported by its name, or from ``file``. Raises ``ConfigError``."""
    module_name, _, path = name.partition(":")
    try:
        found: Any = import_named(module_name, file)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be imported where the learner's ranks run: {error}; put its file into a folder that is on "
            "Python's path there too"
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"{name} is {shown(found)} where the learner's ranks run, but must be a frozen dataclass")
    return found


def _packed(where: str, value: Any, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        return {"$": "float", "value": repr(value)}
    if isinstance(value, Path):
        return {"$": "path", "value": str(value.absolute())}
    if isinstance(value, np.ndarray):
        return {"$": "array", "value": _put(value, arrays)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        prefix = where and f"{where}."
        return {"$": "map", "value": {key: _packed(prefix + key, item, arrays) for key, item in value.items()}}
    return (_packed_items if isinstance(value, list | tuple) else _packed_object)(where, value, arrays)


def _packed_items(where: str, values: Sequence[Any], arrays: dict[str, npt.NDArray[Any]]) -> Any:
    if values and all(isinstance(value, TrainingSequence) for value in values):
        return {"$": "sequences", "value": _packed_sequences(values, arrays)}
    items = [_packed(f"{where}[{index}]", value, arrays) for index, value in enumerate(values)]
    return items if isinstance(values, list) else {"$": "tuple", "value": items}


def _packed_object(where: str, value: Any, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not dataclasses.is_dataclass(value) or not kind.__dataclass_params__.frozen:
        raise ConfigError.for_value(
            where,
            value,
            "a frozen dataclass with fields of numbers, texts and the like, for it travels to the learner's processes: "
            "make it one, or use model.worker = 'thread'",
        )
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"{where} is of the class {name}, which other processes cannot import: define it at the top of a module of "
            "its own, beside the script, or use model.worker = 'thread'"
        )
    fields = {
        field.name: _packed(f"{where}.{field.name}", getattr(value, field.name), arrays)
        for field in dataclasses.fields(value)
        if field.init
    }
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return {"$": "object", "class": name, "file": file, "value": fields}


def _put(array: npt.NDArray[Any], arrays: dict[str, npt.NDArray[Any]]) -> str:
    name = str(len(arrays))
    arrays[name] = array
    return name


def _packed_sequences(sequences: Sequence[Any], arrays: dict[str, npt.NDArray[Any]]) -> Any:
    """Column by column: one array with the values of all sequences, and where there are many, how many of each."""
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(TrainingSequence):
        values = [getattr(sequence, field.name) for sequence in sequences]
        if isinstance(values[0], np.ndarray):
            counts = np.array([len(value) for value in values], dtype=np.int64)
            columns[field.name] = [_put(np.concatenate(values), arrays), _put(counts, arrays)]
        else:
            columns[field.name] = [_put(np.array(values), arrays)]
    return columns


def _unpacked_sequences(columns: Mapping[str, Sequence[str]], arrays: Arrays) -> list[TrainingSequence]:
    values: dict[str, Sequence[Any]] = {}
    for name, [whole, *counts] in columns.items():
        array = arrays[whole]
        values[name] = np.split(array, np.cumsum(arrays[counts[0]])[:-1]) if counts else array.tolist()
    fields = zip(*values.values(), strict=True)
    return [TrainingSequence(**dict(zip(values, each, strict=True))) for each in fields]
