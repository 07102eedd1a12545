"""Child processes that never outlive their parent, and whose last words are in the error when they fail.

A child ends when its standard input reaches its end, which happens however the parent ends: at the exit of the context
manager, by an error, or killed without a chance to clean up.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc

from asyncrl.errors import ConfigError, ServerUnavailable

__all__ = ["Child", "child_process"]

_LOG_TAIL_BYTES = 4_000
_CLOSE_S = 10.0
_TERMINATE_S = 5.0
_BAD_CONFIGURATION = 2
# The exit code by which every asyncrl command says that its options are at fault.


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process that runs, and the file with what it printed."""

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

    async def early_end(self, kind: type[Exception] = ServerUnavailable) -> Exception:
        """The error that says why it ended before it was ready: ``kind``, or that its options are at fault.

        Waits for the end.
        """
        code = await self.process.wait()
        return (ConfigError if code == _BAD_CONFIGURATION else kind)(await self.how_it_ended(code))


@asynccontextmanager
async def child_process(
    command: Sequence[str],
    *,
    name: str,
    log: Path | None = None,
    to_stderr: bool = False,
    first_line: bytes = b"",
    answers: bool = True,
    environment: Mapping[str, str] | None = None,
    patience_s: float | None = None,
) -> AsyncGenerator[Child, None]:
    """Run ``command`` and end it at the exit, the end of its standard input first, then by signals.

    ``first_line`` goes to its standard input. ``log`` is appended to; None is a temporary file, or our stderr with
    ``to_stderr``. ``answers``: somebody here reads its standard output, which otherwise goes where its stderr does.
    ``environment``: all of it, None is ours. ``patience_s``: how long it may take to end by itself, None: 10 seconds.
    An error of the block gets a note if the process had failed before.
    """
    async with anyio.TemporaryDirectory(prefix="asyncrl-child-") as folder:
        path = Path(folder) / "log" if log is None else log
        # A file and not a pipe: nobody has to read it, and the child survives to clean up if its parent is killed.
        # In a session of its own the child does not see Ctrl-C; the parent ends it in order.
        async with await anyio.open_file(path, "ab") as output:
            messages = None if to_stderr else output.wrapped
            process = await anyio.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else messages,
                stderr=messages,
                env=environment,
                start_new_session=True,
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
                    code = await _end(process, patience_s)
                    if code:
                        error.add_note(await child.how_it_ended(code))
                raise
            with anyio.CancelScope(shield=True):
                await _end(process, patience_s)


async def _end(process: anyio.abc.Process, patience_s: float | None) -> int:
    """Ask, then insist: end of input, SIGTERM, SIGKILL. Returns the exit code, or 0 if it was us who insisted."""
    assert process.stdin is not None
    await process.stdin.aclose()
    with anyio.move_on_after(_CLOSE_S if patience_s is None else patience_s):
        return await process.wait()
    process.terminate()
    with anyio.move_on_after(_TERMINATE_S):
        await process.wait()
        return 0
    process.kill()
    await process.wait()
    return 0
