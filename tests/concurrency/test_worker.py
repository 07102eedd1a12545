from __future__ import annotations

import threading
from collections.abc import Iterator

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from asyncrl.concurrency.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker whose thread ends with the test."""
    worker = Worker("test-worker")
    yield worker
    worker.close()


async def test_every_call_runs_in_the_same_named_thread(worker: Worker) -> None:
    """What torch keeps for a thread holds for all calls."""
    first = await worker.run(threading.current_thread)
    assert first is await worker.run(threading.current_thread)
    assert first.name.startswith("test-worker")
    assert first is not threading.current_thread()


async def test_arguments_results_and_errors_pass(worker: Worker) -> None:
    """A call is like a call in place."""
    assert await worker.run(int, "12", base=3) == 5
    with pytest.raises(ZeroDivisionError):
        await worker.run(divmod, 1, 0)


async def test_calls_run_in_order_and_one_at_a_time(worker: Worker) -> None:
    """The second waits for the first, although the loop goes on meanwhile."""
    calls: list[tuple[int, threading.Thread]] = []
    second_asked = threading.Event()

    def first() -> None:
        second_asked.wait()
        calls.append((1, threading.current_thread()))

    def second() -> None:
        calls.append((2, threading.current_thread()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run, first)
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(worker.run, second)
        await anyio.lowlevel.checkpoint()
        second_asked.set()
    assert [number for number, _ in calls] == [1, 2]
    assert len({thread for _, thread in calls}) == 1


async def test_cancellation_waits_for_the_call_that_runs(worker: Worker) -> None:
    """The call ends, and only then the cancelled task does."""
    started = anyio.Event()
    loop_token = anyio.lowlevel.current_token()
    may_end = threading.Event()
    ended: list[str] = []

    def call() -> None:
        anyio.from_thread.run_sync(started.set, token=loop_token)
        may_end.wait()
        ended.append("call")

    async def run() -> None:
        try:
            await worker.run(call)
            await anyio.lowlevel.checkpoint()
            ended.append("not cancelled")
        finally:
            ended.append("task")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await started.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
        may_end.set()
    assert ended == ["call", "task"]
