"""Flags of a command line from the fields of a dataclass: one for each, with the docstring below it as its help."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["add_flags", "option_docs"]

_METAVARS: Mapping[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH", tuple[str, ...]: "TEXT"}


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    kind: type,
    names: Collection[str],
    *,
    forms: Mapping[Any, str] | None = None,
) -> None:
    """Add a flag of the same type for each field of the dataclass ``kind`` that is in ``names``.

    Flags that are not given are not among the arguments, so that the defaults are those of the dataclass. Values stay
    text if ``forms`` says what texts for each type look like.
    """
    hints, docs = get_type_hints(kind), option_docs(kind)
    for field in dataclasses.fields(kind):
        if field.name in names:
            hint = hints[field.name]
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                help=docs.get(field.name, "").replace("%", "%%"),
                default=argparse.SUPPRESS,
                required=field.default is dataclasses.MISSING,
                **(_typed(hint) if forms is None else {"metavar": forms[hint]}),
            )


def _typed(hint: Any) -> dict[str, Any]:
    """How ``argparse`` reads a value of this type, or of this one or None."""
    hint = next(part for part in get_args(hint) if part is not NoneType) if type(hint) is UnionType else hint
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    return {"metavar": _METAVARS[hint], **({"nargs": "+"} if get_origin(hint) is tuple else {"type": hint})}


def option_docs(owner: Callable[..., object]) -> dict[str, str]:
    """What is said of each option of ``owner``, a class or a function, as plain text on one line.

    Either by a docstring below the field, or in the docstring of the owner by a line that begins with its name::

        ``group_size``: trajectories of a group.
        ``api_key``, ``admin_key``: bearer tokens for sampling and for control.
    """
    docs = _named(inspect.getdoc(owner) or "")
    return docs | _below_fields(owner) if isinstance(owner, type) else docs


def _below_fields(kind: type) -> dict[str, str]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: _one_line(str(ast.literal_eval(below.value)))
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr)
    }


def _named(doc: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in re.split(r"(?m)^(?=``[\w`, ]+``: )|(?<=\.) (?=``[\w`, ]+``: )|\n\n", doc):
        names, colon, text = part.partition("``: ")
        if colon and part.startswith("``"):
            found |= dict.fromkeys(re.findall(r"\w+", names), _one_line(text))
    return found


def _one_line(doc: str) -> str:
    """A sentence of its own, without marks for code."""
    words = " ".join(doc.replace("``", "").split())
    return words if doc.lstrip().startswith("``") else words[:1].upper() + words[1:]
