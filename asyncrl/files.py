"""Files that are whole or not there, and tell when they are damaged; their names; and the lock of a folder.

A file is written under a temporary name, flushed to the disk, and given its name in one step; then the folder itself is
flushed, without which the name could be lost with the power. Temporary names begin with a dot; what a killed process
left under one is removed when the directory is opened. Names that asyncrl does not give are left alone.

A sealed file ends with the CRC-32 of everything before it, as eight hexadecimal digits, and with the few bytes by which
its format ends. That way it is written in one pass, and is still JSON, JSON lines or safetensors for other programs. A
sealed folder has a sealed file that lists the others with their sizes and checksums; what is not listed is ignored. The
checksum is against damage (a flipped bit, a lost end, a file that was edited), not against people who mean it. It costs
about a quarter of a second for each gigabyte.

Blocking: call these from a worker thread.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from asyncrl.errors import CheckpointError, ConfigError

__all__ = [
    "DIGITS",
    "LINES_END",
    "check_folder",
    "damaged",
    "discard",
    "draft",
    "drafted",
    "emptied",
    "flush",
    "is_locked",
    "locked",
    "numbered",
    "read_json",
    "reading",
    "remove",
    "require_own",
    "seal_folder",
    "sealed",
    "settle",
    "sweep",
    "sync",
    "unsealed",
    "version_folder",
    "write",
    "write_json",
]

DIGITS = 8
LINES_END = b'"}\n'
"""Of JSON lines whose last one ends with the checksum."""
_JSON_END = b'"\n}'
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2
_KEY = "crc32"
_PIECE_BYTES = 16 * 2**20
_LOCK = ".lock"
_LONGEST_NUMBER = 19


@contextmanager
def locked(directory: Path, option: str) -> Iterator[None]:
    """Hold ``directory``, made if it is not there, for one run; the system lets go of it however the process ends.

    Does not wait: ``ConfigError`` about ``option``, by which users name the directory, if another run is using it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError.for_value(option, str(directory), f"a folder that can be made: {error}") from error
    path = directory / _LOCK
    lock = FileLock(path, thread_local=False)  # one thread may take it, and another one let go of it
    with reading(path):
        try:
            lock.acquire(blocking=False)
        except Timeout:
            owner = path.read_text(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"{option} is {str(directory)!r}, which another run is using (process {owner}): stop that one, or use "
                "another folder"
            ) from None
    try:
        path.write_text(f"{os.getpid()}\n")
        yield
    finally:
        lock.release()


def is_locked(directory: Path) -> bool:
    """True if a run holds ``directory``; changes nothing there."""
    try:
        with (directory / _LOCK).open("rb") as file:
            # Shared, so that others who look do not see each other; held for a moment only.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock, or the file system has none
        return False
    return False


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


def version_folder(directory: Path, version: int) -> Path:
    """Where ``directory`` has ``version``; ``numbered(directory, "v")`` has the versions that are there."""
    return directory / f"v{version:06d}"


def settle(temporary: Path, path: Path) -> None:
    """Give a flushed file or folder its name, for good; it takes the place of one that has that name."""
    if temporary.is_dir() and path.is_dir():  # a folder is not replaced in one step
        shutil.rmtree(path)
    temporary.rename(path)
    sync(path.parent)
    if temporary.parent != path.parent:
        sync(temporary.parent)


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file, whole or not at all."""
    settle(draft(path, pieces), path)


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


def damaged(path: Path, reason: str) -> CheckpointError:
    """The error about a file that is there and is not what was written."""
    return CheckpointError(
        f"{path} is damaged: {reason}; put back a copy of it, or begin the run anew in another folder"
    )


def require_own(path: Path, found: str, run: str | None) -> None:
    """Refuse a file that the run ``found`` has written, in a directory of ``run``; None takes any."""
    if run is not None and found != run:
        raise CheckpointError(f"{path} is of another run; put back that of this one, or use another folder")


def sealed(pieces: Iterable[bytes | memoryview], end: bytes = b"") -> Iterator[bytes | memoryview]:
    """The pieces of a file, and then its checksum and ``end``."""
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
        yield piece
    yield _digits(checksum) + end


def unsealed(path: Path, end: bytes = b"") -> bytes:
    """All of a sealed file. ``CheckpointError`` with its path if it is missing, unreadable or damaged."""
    with reading(path):
        data = path.read_bytes()
    place = len(data) - DIGITS - len(end)
    if place < 0 or data[place + DIGITS :] != end:
        raise damaged(path, "its end is missing")
    if data[place : place + DIGITS] != _digits(zlib.crc32(memoryview(data)[:place])):
        raise damaged(path, "its content does not fit its checksum")
    return data


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write ``value`` as a sealed JSON object for people, whole or not at all."""
    text = orjson.dumps({**value, _KEY: ""}, default=str, option=_JSON_OPTIONS)
    write(path, sealed([text.removesuffix(_JSON_END)], _JSON_END))


def read_json(path: Path) -> dict[str, Any]:
    """What ``write_json`` wrote. Errors as in ``unsealed``."""
    try:
        value: dict[str, Any] = orjson.loads(unsealed(path, _JSON_END))
        del value[_KEY]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"it is no JSON object with a checksum: {error}") from error
    return value


def seal_folder(folder: Path, name: str, about: Mapping[str, object]) -> None:
    """Flush everything in ``folder``, and list it in its file ``name``, which also says what ``about`` says."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in found}
    flush(folder)
    write_json(folder / name, {**about, "files": files})


def check_folder(folder: Path, name: str) -> dict[str, Any]:
    """What a sealed folder says about itself. ``CheckpointError`` with the path of the first file that is damaged."""
    about = read_json(folder / name)
    for file, (size, checksum) in about.pop("files").items():
        path = folder / file
        with reading(path):
            found = path.stat().st_size
            if found != size:
                raise damaged(path, f"it has {found} bytes of {size}")
            if _checksum(path) != checksum:
                raise damaged(path, f"its content does not fit its checksum in {name}")
    return about


def _checksum(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return _digits(checksum).decode()


def _digits(checksum: int) -> bytes:
    return b"%08x" % checksum
