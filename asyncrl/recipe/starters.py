"""Starters: small environments that work as they are, for a user's own to grow from.

Each is a folder of real files, in ``envs/starters`` of the repository and inside of the package when it is installed,
and is copied as it stands. What they have in common is in ``common``.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Literal, TypeAlias

from asyncrl.errors import ConfigError

__all__ = ["Starter", "examples", "write_starter"]

Starter: TypeAlias = Literal["plain", "tools", "judge", "script"]
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def write_starter(folder: Path, kind: Starter) -> list[str]:
    """Write the starter of that kind into ``folder``, which is made; returns the names of its files.

    Raises ``ConfigError`` for a name that would make trouble in a command, and for a folder that holds something.
    """
    name = folder.absolute().name
    if not _NAME.fullmatch(name):
        allowed = "letters, digits, '_' and '-', and begin with a letter"
        raise ConfigError.for_value("the name of the folder", name, allowed)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is not an empty folder: take another name, or delete it")
        folder.mkdir(parents=True, exist_ok=True)
        starters = examples() / "starters"
        files = sorted([*(starters / "common").iterdir(), *(starters / kind).iterdir()], key=lambda file: file.name)
        for file in files:
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    return [file.name for file in files if file.is_file()]


def examples() -> Path:
    """The folder ``envs``: beside the package in a checkout, inside it when installed. Raises ``ConfigError``."""
    package = Path(__file__).parents[1]
    roots = (package.parent / "envs", package / "envs")
    for root in roots:
        if (root / "starters").is_dir():
            return root
    raise ConfigError(f"the examples are in neither {roots[0]} nor {roots[1]}")
