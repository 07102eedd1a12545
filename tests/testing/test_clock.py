"""The virtual clock."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import asyncrl as rl
from asyncrl.testing.clock import Deadlock, VirtualClock, run_virtual


@pytest.mark.virtual_clock
async def test_time_passes_at_once_and_exactly() -> None:
    """A week of sleep ends at exactly its deadline."""
    await anyio.sleep(0.1)
    assert anyio.current_time() == 0.1
    await anyio.sleep(7 * 86400)
    assert anyio.current_time() == 0.1 + 7 * 86400


@pytest.mark.virtual_clock
async def test_deadlines_cancel_at_their_time() -> None:
    """A cancel scope's deadline fires before a later sleep ends."""
    with anyio.move_on_after(5) as scope:
        await anyio.sleep(10)
    assert scope.cancelled_caught
    assert anyio.current_time() == 5


def test_a_hang_is_an_error() -> None:
    """Waiting for something that nobody will do raises instead of hanging."""

    async def wait() -> None:
        await anyio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(wait)


def _order(seed: int | None) -> list[int]:
    seen: list[int] = []

    async def note(number: int) -> None:
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        seen.append(number)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(note, number)

    run_virtual(main, seed=seed)
    return seen


def test_a_seed_shuffles_tasks_and_repeats() -> None:
    """The same seed gives the same order, other seeds give others, no seed keeps asyncio's."""
    assert _order(None) == list(range(8))
    assert _order(1) == _order(1)
    assert len({tuple(_order(seed)) for seed in range(10)}) > 5


def test_threads_are_waited_for() -> None:
    """However long they take, time stands still meanwhile, and nothing is called a deadlock."""

    async def main() -> float:
        with anyio.fail_after(0.001):
            await anyio.to_thread.run_sync(time.sleep, 0.05)
            await asyncio.to_thread(time.sleep, 0.05)
            await anyio.sleep(0.0005)
        return anyio.current_time()

    assert run_virtual(main) == 0.0005


@rl.in_process
def _square(number: int) -> int:
    return number * number


@pytest.mark.slow
def test_processes_are_waited_for() -> None:
    """Also while they start."""

    async def main() -> tuple[int, float]:
        with anyio.fail_after(0.001):
            return await _square(7), anyio.current_time()

    assert run_virtual(main) == (49, 0.0)


def test_a_thread_that_never_returns_is_a_deadlock_in_the_end() -> None:
    """After the grace, if no deadline is pending either."""
    release = threading.Event()

    async def main() -> None:
        await anyio.to_thread.run_sync(release.wait, abandon_on_cancel=True)

    try:
        with pytest.raises(Deadlock, match=r"threads that have not returned in 0\.01 real seconds"):
            run_virtual(main, grace_s=0.01)
    finally:
        release.set()


def test_asyncio_still_has_the_private_names_that_shuffling_needs() -> None:
    """A Python that renames them makes this fail and not a simulation wrong."""
    loop = VirtualClock(seed=0)
    try:
        assert hasattr(loop, "_ready")
        assert hasattr(loop, "_run_once")
        assert hasattr(loop, "_scheduled")
    finally:
        loop.close()
