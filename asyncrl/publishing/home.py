"""The folder that a run writes its versions to: one run at a time, and whose it is when the run is resumed.

Servers read these folders by name, so two runs in one folder would give each other's weights to their servers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.files import reading

__all__ = ["owned", "run_of"]

_LOCK = ".lock"
_RUN = "run-id"
_ID = re.compile(r"[0-9a-f]{32}")


@contextmanager
def owned(directory: Path) -> Generator[None, None, None]:
    """Hold ``directory``, made if it is not there, for one run; the system lets go of it however the process ends."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            allowed = "a folder that no other run is writing its versions to"
            raise ConfigError.for_value("policy.directory", str(directory), allowed) from None
        yield
    finally:
        os.close(descriptor)


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
        written = directory / f".{_RUN}.partial"
        written.write_text(known + "\n")
        written.rename(file)
    return hashlib.blake2b(f"{known}\n{directory.resolve()}".encode(), digest_size=4).hexdigest()
