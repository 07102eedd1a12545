"""Seals: files and folders that tell when they are damaged. Blocking: call these from a worker thread.

A sealed file ends with the CRC-32 of everything before it, as eight hexadecimal digits, and with the few bytes by which
its format ends. That way it is written in one pass, and is still JSON, JSON lines or safetensors for other programs. A
sealed folder has a sealed file that lists the others with their sizes and checksums; what is not listed is ignored.

The checksum is against damage (a flipped bit, a lost end, a file that was edited), not against people who mean it. It
costs about a quarter of a second for each gigabyte.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import CheckpointError
from asyncrl.files import draft, flush, reading, settle

__all__ = [
    "DIGITS",
    "LINES_END",
    "check_folder",
    "damaged",
    "read_json",
    "require_own",
    "seal_folder",
    "sealed",
    "unsealed",
    "write_json",
]

DIGITS = 8
LINES_END = b'"}\n'
"""Of JSON lines whose last one ends with the checksum."""
_JSON_END = b'"\n}'
_KEY = "crc32"
_PIECE_BYTES = 16 * 2**20


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
    text = orjson.dumps({**value, _KEY: ""}, default=str, option=_OPTIONS)
    settle(draft(path, sealed([text.removesuffix(_JSON_END)], _JSON_END)), path)


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


_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2


def _checksum(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return _digits(checksum).decode()


def _digits(checksum: int) -> bytes:
    return b"%08x" % checksum
