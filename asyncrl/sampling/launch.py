"""Starting the embedded server as a child process that never outlives its parent.

The child ends when its standard input reaches its end, which happens however the parent ends: at the exit of the
context manager, by an error, or killed without a chance to clean up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType

import anyio
import anyio.abc
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncrl.errors import ConfigError, ServerUnavailable

__all__ = ["EmbeddedServer", "launched"]

_READY_LINE_BYTES = 65_536
_LOG_TAIL_BYTES = 4_000
_CLOSE_S = 10.0
_TERMINATE_S = 5.0
_BAD_CONFIGURATION = 2
# The exit code by which every asyncrl command says that its options are at fault.


class EmbeddedServer:
    """An embedded server for the model folder ``model``, in a process of its own; entering it gives the URL.

    ``threads``: of torch in the child. ``log``: file for what it prints, None is a temporary one.
    ``start_timeout_s``: the first import of torch takes tens of seconds on a small machine.
    """

    def __init__(
        self, model: Path, *, threads: int = 1, log: Path | None = None, start_timeout_s: float = 300.0
    ) -> None:
        command = [sys.executable, "-m", "asyncrl", "serve", "--model", str(model), "--host", "127.0.0.1"]
        self.command = (*command, "--port", "0", "--threads", str(threads), "--exit-with-stdin")
        """What is run."""
        self._server: AbstractAsyncContextManager[str] = launched(
            self.command, log=log, start_timeout_s=start_timeout_s
        )

    async def __aenter__(self) -> str:
        return await self._server.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._server.__aexit__(kind, error, traceback)


@asynccontextmanager
async def launched(
    command: Sequence[str], *, log: Path | None = None, start_timeout_s: float = 300.0
) -> AsyncGenerator[str, None]:
    """Run ``command``, a server that prints one JSON line with its ``url`` when it is ready, and yield that URL.

    Raises ``ConfigError`` if it ends with the exit code for bad options, ``ServerUnavailable`` if it ends otherwise or
    is not ready in time; both with its last lines. If it fails later, the error that follows gets them as a note.
    """
    async with anyio.TemporaryDirectory(prefix="asyncrl-server-") as folder:
        path = Path(folder) / "log" if log is None else log
        # A file and not a pipe: nobody has to read it, and the child survives to clean up if its parent is killed.
        # In a session of its own the child does not see Ctrl-C; the parent ends it in order.
        async with await anyio.open_file(path, "wb") as output:
            process = await anyio.open_process(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output.wrapped, start_new_session=True
            )
        async with process:
            try:
                yield await _ready_url(process, start_timeout_s, path)
            except BaseException as error:
                with anyio.CancelScope(shield=True):
                    code = await _end(process)
                    if code:
                        error.add_note(await _epitaph(code, path))
                raise
            with anyio.CancelScope(shield=True):
                await _end(process)


async def _ready_url(process: anyio.abc.Process, timeout_s: float, log: Path) -> str:
    assert process.stdout is not None
    try:
        with anyio.fail_after(timeout_s):
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", _READY_LINE_BYTES)
            return str(orjson.loads(line)["url"])
    except TimeoutError as error:
        raise ServerUnavailable(f"the embedded server was not ready in {timeout_s:g} s; {await _tail(log)}") from error
    except anyio.IncompleteRead:
        code = await process.wait()
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ServerUnavailable(f"the embedded server did not say its URL but {line!r}; {await _tail(log)}") from error
    kind = ConfigError if code == _BAD_CONFIGURATION else ServerUnavailable
    raise kind(await _epitaph(code, log))


async def _end(process: anyio.abc.Process) -> int:
    """Ask, then insist: end of input, SIGTERM, SIGKILL. Returns the exit code, or 0 if it was us who insisted."""
    assert process.stdin is not None
    await process.stdin.aclose()
    with anyio.move_on_after(_CLOSE_S):
        return await process.wait()
    process.terminate()
    with anyio.move_on_after(_TERMINATE_S):
        await process.wait()
        return 0
    process.kill()
    await process.wait()
    return 0


async def _epitaph(code: int, log: Path) -> str:
    return f"the embedded server ended with exit code {code}; {await _tail(log)}"


async def _tail(log: Path) -> str:
    text = (await anyio.Path(log).read_bytes())[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return f"its last lines:\n{text}" if text else "it printed nothing"
