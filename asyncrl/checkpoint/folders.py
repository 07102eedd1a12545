"""Which folder a run gets: a new one, one that is not another run's, or that of a run that goes on."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.plain import shown

__all__ = ["has_run", "make_folder", "new_folder", "require_run", "require_unused"]

_RUN_FILES = ("run.json", "metrics.jsonl", "events.jsonl", "rollouts", "state", "weights", "journal")


def new_folder(parent: Path, name: str) -> Path:
    """A folder in ``parent`` that no run has yet; it is not made."""
    return parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def has_run(folder: Path) -> bool:
    """True if ``folder`` is that of a run."""
    return os.path.lexists(folder / _RUN_FILES[0])


def require_run(folder: Path, key: str) -> Path:
    """``folder``. Raises ``ConfigError`` naming ``key`` unless it is that of a run."""
    if not has_run(folder):
        raise ConfigError.for_value(key, str(folder), "the folder of a run (there is no run.json in it)")
    return folder


def require_unused(folder: Path, key: str) -> Path:
    """``folder``. Raises ``ConfigError`` naming ``key`` if a run has left files there."""
    if "\0" in str(folder):
        raise ConfigError.for_value(key, str(folder), "a folder that can be made")
    found = [name for name in _RUN_FILES if os.path.lexists(folder / name)]
    if found:
        hint = f"go on with that one by --resume {folder}, or " if found[0] == _RUN_FILES[0] else ""
        raise ConfigError(
            f"{key} is {shown(str(folder))}, which has the files of another run ({', '.join(found)}): {hint}use "
            "another folder"
        )
    return folder


def make_folder(folder: Path, key: str) -> None:
    """Make ``folder`` unless it is there. Raises ``ConfigError`` naming ``key`` if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError.for_value(key, str(folder), f"a folder that can be made: {error}") from error
