"""References: the user's own objects, as a recipe names them: ``env.py:Name`` beside it, or ``package.module:Name``.

What is named is imported and called here, and whatever that raises becomes a ``ConfigError`` with the recipe's key, the
reference, and the user's file and line. What the objects are for is left to ``compose``.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.modules import load_file
from asyncrl.plain import error_text, shown
from asyncrl.rollout.usercode import place_of

__all__ = ["call", "refuse", "require_keywords", "resolve"]


def resolve(key: str, reference: str, base: Path) -> Any:
    """The object that ``reference`` stands for; its file is in ``base``.

    Raises ``ConfigError`` naming ``key`` if there is no such file, module or name, or if importing it fails.
    """
    where, colon, name = reference.partition(":")
    if not (where and colon and name):
        raise ConfigError.for_value(key, reference, "a reference such as 'env.py:Name' or 'package.module:Name'")
    file = base / where
    if where.endswith(".py") and not os.path.isfile(file):  # noqa: PTH113  that of pathlib raises for a name too long
        raise ConfigError(f"{key} is {shown(reference)}, but there is no file {shown(str(file))}")
    try:
        module = _module_from_file(file) if where.endswith(".py") else importlib.import_module(where)
        if hasattr(module, name):
            return getattr(module, name)
    except (Exception, SystemExit) as error:
        raise refuse(key, reference, "cannot be imported", error) from error
    near = difflib.get_close_matches(name, [known for known in vars(module) if not known.startswith("_")], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    found = getattr(module, "__file__", None) or where
    raise ConfigError(f"{key} is {shown(reference)}, but {found} has no {shown(name)}{hint}")


def call(
    key: str,
    reference: str,
    function: Any,
    *arguments: object,
    expects: str,
    keywords: Mapping[str, object] | None = None,
) -> Any:
    """What the function at ``reference`` returns; ``expects`` says what it must be if it is none or takes other
    arguments.
    """
    if not callable(function) or isinstance(function, type):
        raise ConfigError.for_value(key, reference, expects)
    options = keywords or {}
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"{key} is {shown(reference)}, but must be {expects}: {error}") from error
    except ValueError:
        pass  # of some functions in C nobody knows the arguments
    try:
        result = function(*arguments, **options)
    except (Exception, SystemExit) as error:
        raise refuse(key, reference, "raised", error) from error
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigError(f"{key} is {shown(reference)}, but must be {expects}: it is an async function")
    return result


def refuse(key: str, reference: str, what: str, error: BaseException) -> ConfigError:
    """The error that says what the user's code did, and where in it."""
    place = place_of(error)
    return ConfigError(f"{key} is {shown(reference)}, which {what}: {error_text(error)}{place and f' ({place})'}")


def require_keywords(key: str, reference: str, function: Any, keywords: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` unless the function or class at ``reference`` takes exactly these keywords."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # of some functions in C nobody knows the arguments
    parameters = signature.parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for keyword in keywords:
            if keyword not in parameters:
                raise ConfigError.for_unknown_key(
                    keyword, parameters, where=f"{key}, which are the keywords of {shown(reference)}"
                )
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(f"[{key}]: {shown(reference)}: {error}") from error


def _module_from_file(file: Path) -> ModuleType:
    # The name tells apart the env.py of every recipe; one file is one module, whatever refers to it.
    name = f"asyncrl_recipe_{hashlib.sha256(str(file).encode(errors='surrogateescape')).hexdigest()[:16]}"
    return sys.modules.get(name) or load_file(name, file)
