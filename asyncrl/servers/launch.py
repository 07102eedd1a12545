"""Starting a server as a child process that never outlives its parent; the embedded server among them."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncrl.concurrency.children import Child, child_process
from asyncrl.errors import ServerUnavailable

__all__ = ["EmbeddedServer", "launched"]

_READY_LINE_BYTES = 65_536


class EmbeddedServer:
    """An embedded server for the model folder ``model``, in a process of its own, as a source of one URL.

    ``threads``: of torch in the child. ``log``: file for what it prints, None is a temporary one.
    ``start_timeout_s``: the first import of torch takes tens of seconds on a small machine.
    """

    servers = 1
    starts_servers = True

    def __init__(
        self, model: Path, *, threads: int = 1, log: Path | None = None, start_timeout_s: float = 300.0
    ) -> None:
        command = [sys.executable, "-m", "asyncrl", "serve", "--model", str(model), "--host", "127.0.0.1"]
        self.command = (*command, "--port", "0", "--threads", str(threads), "--exit-with-stdin")
        """What is run."""
        self._log = log
        self._start_timeout_s = start_timeout_s

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Sequence[str], None]:
        """Start it; its URL when it is ready."""
        async with launched(self.command, log=self._log, start_timeout_s=self._start_timeout_s) as url:
            yield (url,)


@asynccontextmanager
async def launched(
    command: Sequence[str], *, log: Path | None = None, start_timeout_s: float = 300.0
) -> AsyncGenerator[str, None]:
    """Run ``command``, a server that prints one JSON line with its ``url`` when it is ready, and yield that URL.

    Raises ``ConfigError`` if it ends with the exit code for bad options, ``ServerUnavailable`` if it ends otherwise or
    is not ready in time; both with its last lines. If it fails later, the error that follows gets them as a note.
    """
    async with child_process(command, name="the embedded server", log=log) as child:
        yield await _ready_url(child, start_timeout_s)


async def _ready_url(child: Child, timeout_s: float) -> str:
    assert child.process.stdout is not None
    try:
        with anyio.fail_after(timeout_s):
            line = await BufferedByteReceiveStream(child.process.stdout).receive_until(b"\n", _READY_LINE_BYTES)
            return str(orjson.loads(line)["url"])
    except TimeoutError as error:
        raise ServerUnavailable(f"{child.name} was not ready in {timeout_s:g} s; {await child.last_lines()}") from error
    except anyio.IncompleteRead:
        raise await child.early_end() from None
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ServerUnavailable(f"{child.name} did not say its URL but {line!r}; {await child.last_lines()}") from error
