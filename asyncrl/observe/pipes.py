"""Standard streams that outlive their readers: ``asyncrl demo 2>&1 | head`` must not end the run with the pipe.

What is written to a closed pipe, or to a terminal that is gone, is dropped: nobody could read it. The descriptor then
leads to the null device, so that whoever else writes to it, and Python itself when it ends, meets no closed pipe.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar, cast

__all__ = ["LastingStream", "lasting_streams"]

T = TypeVar("T")

_GONE = (errno.EPIPE, errno.EIO)


class LastingStream:
    """``stream``, but for what happens when its reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.gone = False
        """Nobody reads it any more."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, or drop it once the reader is gone."""
        self._try(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write ``lines`` one after the other, or drop them."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush what was written, if anybody reads it."""
        self._try(self._stream.flush)

    def _try(self, function: Callable[..., T], *args: Any) -> None:
        if self.gone:
            return
        try:
            function(*args)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self.gone = True
            with contextlib.suppress(io.UnsupportedOperation):
                descriptor = self._stream.fileno()
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """``sys.stdout`` and ``sys.stderr`` are such streams in the block."""
    out, err = (cast(TextIO, LastingStream(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()
