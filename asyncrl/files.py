"""Files that are whole or not there, their names, and the lock of a run directory. Blocking: call from a worker thread.

A file is written under a temporary name, flushed to the disk, and given its name in one step; then the folder itself is
flushed, without which the name could be lost with the power. Temporary names begin with a dot; what a killed process
left under one is removed when the directory is opened. Names that asyncrl does not give are left alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import CheckpointError, ConfigError

__all__ = [
    "discard",
    "draft",
    "drafted",
    "emptied",
    "flush",
    "locked",
    "numbered",
    "reading",
    "remove",
    "settle",
    "sweep",
    "sync",
]

_LOCK = ".lock"
_LONGEST_NUMBER = 19


def drafted(path: Path) -> Path:
    """The temporary name of ``path``."""
    return path.with_name(f".{path.name}.partial")


def draft(path: Path, pieces: Iterable[bytes | memoryview]) -> Path:
    """Write a file under the temporary name of ``path`` and flush it; ``settle`` gives it its name."""
    temporary = drafted(path)
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # A full disk does not say by itself which file it was.
        raise OSError(error.errno, error.strerror, str(temporary)) from error
    return temporary


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """The block reads ``path``: what the system says against that becomes a ``CheckpointError`` that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing; put back a copy of it, or begin the run anew in another folder"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be used: {error.strerror or error}") from error


def numbered(folder: Path, before: str = "", after: str = "") -> list[int]:
    """The numbers of what is in ``folder`` under names such as ``000012.jsonl`` (``after`` is ``.jsonl``), in order.

    Copies, backups of editors and other files that somebody has put there have none.
    """
    with reading(folder):
        names = [path.name for path in folder.iterdir()]
    found = []
    for name in names:
        digits = name.removeprefix(before).removesuffix(after)
        if digits.isascii() and digits.isdigit() and len(digits) < _LONGEST_NUMBER:
            # One number has one name: ``1.jsonl`` is not what asyncrl writes.
            found += [int(digits)] if name == f"{before}{int(digits):06d}{after}" else []
    return sorted(found)


def settle(temporary: Path, path: Path) -> None:
    """Give a flushed file or folder its name, for good."""
    temporary.rename(path)
    sync(path.parent)
    if temporary.parent != path.parent:
        sync(temporary.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush(folder: Path) -> None:
    """Flush all that is in ``folder``, and itself."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def emptied(folder: Path) -> None:
    """Make ``folder``, or remove what is in it."""
    if folder.exists():
        remove(folder)
    folder.mkdir(parents=True)


def remove(path: Path) -> None:
    """Remove a file or folder that nobody needs. One that is gone already is none."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove a file that is no longer needed. A folder in its place is somebody else's."""
    if not path.is_dir():
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what a killed process left half written in ``folder``."""
    for path in folder.glob(".*.partial"):
        remove(path)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the run directory for this process; the system lets go of it however the process ends."""
    with reading(directory / _LOCK):
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"checkpointing.run_dir is {str(directory)!r}, which another run is using (process {owner}): stop that "
                "one, or use another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)
