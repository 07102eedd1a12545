"""The virtual clock."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

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


def test_a_thread_is_waited_for_within_the_grace() -> None:
    """With a grace, a short thread call does not look like a deadlock."""

    async def main() -> int:
        with anyio.fail_after(1):
            return await anyio.to_thread.run_sync(lambda: 7)

    assert run_virtual(main, grace_s=2.0) == 7


def test_asyncio_still_has_the_private_names_that_shuffling_needs() -> None:
    """A Python that renames them makes this fail and not a simulation wrong."""
    loop = VirtualClock(seed=0)
    try:
        assert hasattr(loop, "_ready")
        assert hasattr(loop, "_run_once")
        assert hasattr(loop, "_scheduled")
    finally:
        loop.close()
