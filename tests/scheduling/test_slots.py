"""The semaphore that serves the oldest first."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from asyncrl.scheduling.slots import OrderedSlots
from asyncrl.testing.clock import run_virtual


@pytest.mark.virtual_clock
async def test_the_oldest_admitted_waits_least() -> None:
    """Waiters get slots in admission order, whatever the order in which they asked."""
    slots = OrderedSlots(1)
    assert slots.acquire_nowait()
    served: list[tuple[int, int]] = []

    async def use(order: tuple[int, int]) -> None:
        await slots.acquire(order)
        served.append(order)
        slots.release()

    async with anyio.create_task_group() as tasks:
        for order in [(3, 0), (1, 1), (2, 0), (1, 0)]:
            tasks.start_soon(use, order)
        await anyio.sleep(1)
        slots.release()
    assert served == [(1, 0), (1, 1), (2, 0), (3, 0)]
    assert slots.in_use == 0


@pytest.mark.virtual_clock
async def test_a_freed_slot_belongs_to_the_waiter_at_once() -> None:
    """Between the release and the waiter's next step nobody else can take the slot."""
    slots = OrderedSlots(1)
    assert slots.acquire_nowait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slots.acquire, (0, 0))
        await anyio.sleep(1)
        slots.release()
        assert not slots.acquire_nowait()
    assert slots.in_use == 1


@pytest.mark.parametrize("seed", range(50))
def test_cancelled_waiters_lose_no_slot(seed: int) -> None:
    """Whoever is cancelled, before or after the grant, all slots are free in the end."""

    async def main() -> int:
        slots = OrderedSlots(2)

        async def use(number: int) -> None:
            with anyio.move_on_after(1 + number % 3):
                await slots.acquire((number, 0))
                try:
                    await anyio.sleep(1)
                    await checkpoint()
                finally:
                    slots.release()

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(use, number)
        return slots.in_use

    assert run_virtual(main, seed=seed) == 0
