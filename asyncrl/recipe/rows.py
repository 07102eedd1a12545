"""The rows that a recipe names: a file, or what a function of the user's returns.

The keys of ``[data]`` other than ``train`` and ``heldout`` are keywords of the functions: each gets those that it
takes, and one that neither takes is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from asyncrl.errors import ConfigError
from asyncrl.plain import shown
from asyncrl.recipe.config import DataFiles
from asyncrl.recipe.references import call, resolve
from asyncrl.rollout.border import checked_rows
from asyncrl.rollout.rowfiles import ROW_FILES, load_rows
from asyncrl.types import Row

__all__ = ["read_rows"]

_FUNCTION = "a function that returns a list of rows, and whose arguments are the other keys of [data]"


def read_rows(data: DataFiles, name: Literal["train", "heldout"], folder: Path) -> list[Row]:
    """The rows of ``data.train`` or ``data.heldout``, seen from ``folder``. Raises ``ConfigError``.

    Blocking: files are read, and the user's code runs.
    """
    sources = {"train": data.train} | ({} if data.heldout is None else {"heldout": data.heldout})
    functions = {key: _function(f"data.{key}", said, folder) for key, said in sources.items()}
    _require_taken(data.options, functions)
    key, said, function = f"data.{name}", sources[name], functions[name]
    if function is None:
        try:
            return load_rows(folder / Path(said).expanduser())
        except ConfigError as error:
            raise ConfigError(f"{key} is {shown(said)}, but {error}") from error
    options = {option: value for option, value in data.options.items() if _takes(function, option)}
    rows = call(key, said, function, expects=_FUNCTION, keywords=options)
    return checked_rows(rows, f"what {key} = {shown(said)} returned")


def _function(key: str, said: str, folder: Path) -> Any:
    """What a reference stands for; None if a file is meant."""
    if Path(said).suffix.lower() in ROW_FILES or (folder / Path(said).expanduser()).is_dir():
        return None
    if ":" not in said:
        allowed = f"a file ({', '.join(ROW_FILES)}) or a reference to a function such as 'env.py:rows'"
        raise ConfigError.for_value(key, said, allowed)
    return resolve(key, said, folder)


def _require_taken(options: Mapping[str, object], functions: Mapping[str, Any]) -> None:
    known = {*functions, "train", "heldout"}
    for function in functions.values():
        known.update(_parameters(function))
    for option in options:
        if not any(_takes(function, option) for function in functions.values()):
            raise ConfigError.for_unknown_key(
                option, known, where="data, whose keys are train, heldout and the keywords of their functions"
            )


def _takes(function: Any, option: str) -> bool:
    parameters = _parameters(function)
    return option in parameters or any(found.kind is found.VAR_KEYWORD for found in parameters.values())


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Empty if nobody knows them, as those of some functions in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
