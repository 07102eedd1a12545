"""Starting a server as a child process that never outlives its parent; the embedded server among them.

The child ends when its standard input reaches its end, which happens however the parent ends: at the exit of the
context manager, by an error, or killed without a chance to clean up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncrl.errors import ConfigError, ServerUnavailable

__all__ = ["Child", "EmbeddedServer", "child_process", "launched"]

_READY_LINE_BYTES = 65_536
_LOG_TAIL_BYTES = 4_000
_CLOSE_S = 10.0
_TERMINATE_S = 5.0
_BAD_CONFIGURATION = 2
# The exit code by which every asyncrl command says that its options are at fault.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A server process that runs, and the file with what it printed."""

    name: str
    process: anyio.abc.Process
    log: Path | None
    """None: it prints where we do."""

    async def how_it_ended(self, code: int) -> str:
        """How it ended, and its last lines."""
        return f"{self.name} ended with exit code {code}; {await self.last_lines()}"

    async def last_lines(self) -> str:
        """The end of its log, in words."""
        if self.log is None:
            return "what it printed is above"
        text = (await anyio.Path(self.log).read_bytes())[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"its last lines:\n{text}" if text else "it printed nothing"

    async def early_end(self) -> ConfigError | ServerUnavailable:
        """The error that says why it ended before it was ready; waits for the end."""
        code = await self.process.wait()
        kind = ConfigError if code == _BAD_CONFIGURATION else ServerUnavailable
        return kind(await self.how_it_ended(code))


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


@asynccontextmanager
async def child_process(
    command: Sequence[str],
    *,
    name: str,
    log: Path | None = None,
    to_stderr: bool = False,
    first_line: bytes = b"",
) -> AsyncGenerator[Child, None]:
    """Run ``command`` and end it at the exit, the end of its standard input first, then by signals.

    ``first_line`` goes to its standard input. ``log`` is appended to; None is a temporary file, or our stderr with
    ``to_stderr``. An error of the block gets a note if the process
    had failed before.
    """
    async with anyio.TemporaryDirectory(prefix="asyncrl-server-") as folder:
        path = Path(folder) / "log" if log is None else log
        # A file and not a pipe: nobody has to read it, and the child survives to clean up if its parent is killed.
        # In a session of its own the child does not see Ctrl-C; the parent ends it in order.
        async with await anyio.open_file(path, "ab") as output:
            messages = None if to_stderr else output.wrapped
            process = await anyio.open_process(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, start_new_session=True
            )
        child = Child(name=name, process=process, log=None if to_stderr else path)
        async with process:
            try:
                assert process.stdin is not None
                if first_line:
                    await process.stdin.send(first_line)
                yield child
            except BaseException as error:
                with anyio.CancelScope(shield=True):
                    code = await _end(process)
                    if code:
                        error.add_note(await child.how_it_ended(code))
                raise
            with anyio.CancelScope(shield=True):
                await _end(process)


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
