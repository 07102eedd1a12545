"""The reference of recipes: every key with its type, its default and a sentence, from where each of them stands.

Keys are those of ``SECTIONS``; types and defaults are the parameters of the classes that they are for, sentences the
documentation there. Nothing is said twice, so that nothing can be out of date.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from asyncrl.errors import ConfigError
from asyncrl.flags import option_docs
from asyncrl.learning.losses import loss_kinds
from asyncrl.recipe.config import SECTIONS
from asyncrl.recipe.tables import Key, keys_of

__all__ = ["KeyReference", "SectionReference", "chosen", "sections"]

_OPEN: Mapping[str, str] = {
    "env": "Every other key is an argument of the environment.",
    "data": "Every other key is an argument of the functions that return rows.",
    "loss": "Each loss has keys of its own; trainer.loss says which loss it is.",
}
_WORDS: Mapping[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Any: "any value",
    NoneType: "nothing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReference:
    """One key of a recipe."""

    name: str
    """Such as ``trainer.max_staleness``."""
    kind: str
    default: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionReference:
    """One section with its keys."""

    name: str
    text: str
    """Which class has the same options in Python, and which other keys there may be."""
    keys: tuple[KeyReference, ...]


def sections() -> tuple[SectionReference, ...]:
    """The whole reference."""
    return tuple(_section(name) for name in SECTIONS)


def chosen(part: str) -> tuple[SectionReference, ...]:
    """What the reference has of ``trainer``, ``trainer.max_staleness`` or ``max_staleness``, or all of it for ``""``.

    Raises ``ConfigError`` with the nearest name if there is nothing.
    """
    everything = sections()
    found = []
    for section in everything:
        if part in ("", section.name):
            found.append(section)
        elif keys := tuple(key for key in section.keys if _is_part(part, key.name)):
            found.append(SectionReference(name=section.name, text=section.text, keys=keys))
    if not found:
        names = [section.name for section in everything]
        names += [key.name for section in everything for key in section.keys]
        raise ConfigError.for_unknown_key(part, names, where="recipe")
    return tuple(found)


def _is_part(part: str, name: str) -> bool:
    return name == part or name.startswith(f"{part}.") or name.endswith(f".{part}")


def _section(name: str) -> SectionReference:
    owners = [key.owner for part in SECTIONS[name] for key in part.values()]
    if name == "loss":
        keys = [entry for kind in loss_kinds().values() for entry in _loss_keys(kind)]
        owners = list(loss_kinds().values())
    else:
        merged: dict[str, Key] = {}
        for part in SECTIONS[name]:
            merged = {**part, **merged}  # the first one wins
        names = [key for part in SECTIONS[name] for key in part]
        keys = [entry for key in dict.fromkeys(names) for entry in _entries(f"{name}.{key}", merged[key])]
    public = dict.fromkeys(owner.__qualname__ for owner in owners if owner is not None and _is_public(owner))
    classes = [f"In Python: {', '.join(public)}."] if public else []
    return SectionReference(name=name, text=" ".join([*classes, _OPEN.get(name, "")]).strip(), keys=tuple(keys))


def _is_public(owner: Callable[..., object]) -> bool:
    return not owner.__module__.startswith("asyncrl.recipe")


def _loss_keys(kind: type) -> Iterator[KeyReference]:
    name = getattr(kind, "name", "")
    for option, key in keys_of(kind).items():
        for entry in _entries(f"loss.{option}", key):
            yield KeyReference(name=entry.name, kind=entry.kind, default=entry.default, text=f"Of {name}. {entry.text}")


def _entries(name: str, key: Key) -> Iterator[KeyReference]:
    """The key, and those of its table."""
    text = "" if key.owner is None else option_docs(key.owner).get(key.name, "")
    yield KeyReference(name=name, kind=_kind(key), default=_default(key.default), text=text)
    if key.table is not None:
        for inner, rule in keys_of(key.table).items():
            yield from _entries(f"{name}.{inner}", rule)


def _kind(key: Key) -> str:
    kinds = [] if key.plain is None else [_type(key.plain)]
    return " or ".join([*kinds, *(["table"] if key.table is not None else [])])


def _type(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(map(_toml, arguments))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type, arguments)))
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is Mapping:
        return f"table of {_type(arguments[1])}"
    assert origin is Annotated, f"a type of a recipe that has no words: {kind}"
    return "path"


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if value is None:
        return "not set"
    return _toml(value)


def _toml(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | str | Path):
        return json.dumps(str(value) if isinstance(value, Path) else value)
    if isinstance(value, int | float):
        return str(value)
    return "{}"  # a table that is made anew for each run
