"""Runs a command that never outlives the process that asked for it. Standard library only: it starts in an instant.

Usage: ``python supervise.py``, with one line of JSON on standard input: ``command``, ``environment`` (added to the own
one) and ``secrets`` (hidden in what the command prints, which goes to stderr). The command gets a process group of its
own. The whole group ends when standard input does, when this process gets a signal, or when the command's first process
ends by itself; that one's exit code is then this one's. If this process is killed, the kernel ends the first process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["main"]

_GRACE_S = 2.0
_LOOK_S = 0.02
_LINE_BYTES = 65_536
_PR_SET_PDEATHSIG = 1
_HIDDEN = b"[hidden]"
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Run what standard input says, and return its exit code."""
    task = json.loads(sys.stdin.buffer.readline())
    process = subprocess.Popen(
        task["command"],
        env={**os.environ, **task["environment"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,  # noqa: PLW1509  no thread was started yet
    )
    # From here on signals wait for us, in every thread; the command has the default ones.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    copier = threading.Thread(
        target=_copy, args=(process, [secret.encode() for secret in task["secrets"]]), daemon=True
    )
    copier.start()
    for wait in (_until_end_of_input, process.wait):
        threading.Thread(target=_stop_after, args=(wait,), daemon=True).start()
    signal.sigwait(_STOP)
    code = _end(process)
    copier.join(timeout=1.0)
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    """Linux only, elsewhere the end of standard input has to do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _copy(process: subprocess.Popen[bytes], secrets: Sequence[bytes]) -> None:
    assert process.stdout is not None
    # By lines, so that no secret is cut in two.
    while line := process.stdout.readline(_LINE_BYTES):
        for secret in secrets:
            line = line.replace(secret, _HIDDEN)
        # Whoever read it may be gone; the command must not notice.
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), line)


def _stop_after(wait: Callable[[], object]) -> None:
    wait()
    os.kill(os.getpid(), signal.SIGTERM)


def _until_end_of_input() -> None:
    # Without a buffer: a thread that waits in one when the interpreter ends would spoil its end.
    while os.read(0, 4096):
        pass


def _end(process: subprocess.Popen[bytes]) -> int:
    """End all of the group. Returns the code of its first process, 0 if it was told to end."""
    by_itself = process.poll()
    # Not asked first: SGLang would wait for its requests, which nobody wants any more, and looks every 5 s.
    process.kill()
    process.wait()
    # The others see that it is gone; the one that cleans up shared memory needs a moment for it.
    deadline = time.monotonic() + _GRACE_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(_LOOK_S)
        os.killpg(process.pid, signal.SIGKILL)
    return by_itself or 0


if __name__ == "__main__":
    sys.exit(main())
