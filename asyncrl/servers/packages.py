"""Packages that are installed apart from this environment: by which program, and by one process at a time.

Used by the commands ``install-..`` alone; nothing else fetches anything.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from asyncrl.errors import ServerUnavailable
from asyncrl.servers.machine import program

__all__ = ["find_uv", "one_at_a_time", "run_installer"]

_ERROR_LINES = 20


def find_uv() -> list[str] | None:
    """How ``uv`` is started, None if it is not there."""
    if (found := program("uv")) is not None:
        return [found]
    return [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else None


def run_installer(command: Sequence[str], directory: Path) -> None:
    """Run ``command`` in ``directory``, with its output on stderr: stdout is for the result.

    Raises ``ServerUnavailable`` with its last lines if it fails.
    """
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            sys.stderr.write(line)
            lines.append(line)
    if process.returncode:
        last = "".join(lines[-_ERROR_LINES:]).strip()
        raise ServerUnavailable(f"{command[0]} ended with exit code {process.returncode}; its last lines:\n{last}")


@contextmanager
def one_at_a_time(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of ``directory``, which need not be there; it goes with its owner, however that ends."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory.with_name(directory.name + ".lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"waiting for another process that makes {directory}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
