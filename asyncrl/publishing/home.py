"""Whose the folder is that a run writes its versions to, when the run is resumed."""

from __future__ import annotations

import hashlib
import re
import uuid
from pathlib import Path

from asyncrl.files import reading, write

__all__ = ["run_of"]

_RUN = "run-id"
_ID = re.compile(r"[0-9a-f]{32}")


def run_of(directory: Path) -> str:
    """Eight hexadecimal digits for the run that is resumed from ``directory``; made the first time.

    A copy of the folder in another place is another run: both may go on at the same time.
    """
    file = directory / _RUN
    known = ""
    if file.exists():
        with reading(file):
            known = file.read_text(errors="replace").strip()
    if not _ID.fullmatch(known):
        directory.mkdir(parents=True, exist_ok=True)
        known = uuid.uuid4().hex
        write(file, [f"{known}\n".encode()])
    return hashlib.blake2b(f"{known}\n{directory.resolve()}".encode(), digest_size=4).hexdigest()
