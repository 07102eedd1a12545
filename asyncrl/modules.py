"""Modules that only a file leads to, such as the Python file of a recipe, by a name that was made for them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["import_named", "load_file"]


def import_named(name: str, file: str | None) -> ModuleType:
    """The module ``name``, imported, or loaded from ``file`` in a process that does not know it yet."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name or file is None:
            raise
        return load_file(name, file)  # a recipe's Python file has a name that only the parent knows


def load_file(name: str, file: str | Path) -> ModuleType:
    """Import ``file`` as the module ``name``. Raises ``ImportError`` if it is no Python file, or what it raises.

    It can import the files beside it, as a program can; they come first, and stay so.
    """
    folder = str(Path(file).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
