"""Threads for functions that may never return."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextvars import ContextVar

import anyio
import pytest

from asyncrl.concurrency.threads import DaemonThreads

COLOUR: ContextVar[str] = ContextVar("colour")
HANGS = """
import threading
import anyio
from asyncrl.concurrency.threads import DaemonThreads

async def main():
    with anyio.move_on_after(0.01):
        await DaemonThreads(1).call(threading.Event().wait)

anyio.run(main)
print("ended")
"""


def test_a_call_returns_or_raises_what_its_function_does() -> None:
    """Also what a future cannot hold."""

    def fail(error: BaseException) -> None:
        raise error

    async def main() -> None:
        threads = DaemonThreads(2)
        assert await threads.call(lambda: 7) == 7
        with pytest.raises(KeyError, match="a"):
            await threads.call(lambda: fail(KeyError("a")))
        with pytest.raises(RuntimeError) as stopped:
            await threads.call(lambda: fail(StopIteration()))
        assert isinstance(stopped.value.__cause__, StopIteration)
        with pytest.raises(SystemExit):
            await threads.call(lambda: fail(SystemExit(3)))

    anyio.run(main)


def test_a_function_has_the_context_of_its_caller_and_may_run_a_loop() -> None:
    """As in anyio's own threads."""

    async def look() -> str:
        await anyio.lowlevel.checkpoint()
        return COLOUR.get()

    async def main() -> str:
        COLOUR.set("red")
        return await DaemonThreads(1).call(lambda: anyio.run(look))

    assert anyio.run(main) == "red"


def test_a_thread_serves_one_call_after_the_other() -> None:
    """Starting one takes longer than most calls."""

    async def main() -> set[int]:
        threads = DaemonThreads(4)
        return {await threads.call(threading.get_ident) for _ in range(5)}

    assert len(anyio.run(main)) == 1


def test_an_idle_thread_ends_and_another_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left behind by a loop that has ended."""
    monkeypatch.setattr("asyncrl.concurrency.threads._IDLE_S", 0.001)

    async def main() -> list[threading.Thread]:
        threads = DaemonThreads(1)
        served = []
        for _ in range(3):
            served.append(await threads.call(threading.current_thread))
            await anyio.to_thread.run_sync(served[-1].join)
        return served

    assert len(set(anyio.run(main))) == 3


@pytest.mark.slow
def test_a_function_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    """Python waits for other threads at exit."""
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "ended\n"
