"""The semaphore that serves the oldest first."""

from __future__ import annotations

import random

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


@pytest.mark.virtual_clock
async def test_a_smaller_limit_waits_for_releases() -> None:
    """Holders keep their slots; the first releases go to nobody, and from then on the oldest waiter is served."""
    slots = OrderedSlots(5)
    for _ in range(5):
        assert slots.acquire_nowait()
    served: list[int] = []

    async def use(number: int) -> None:
        await slots.acquire((number, 0))
        served.append(number)

    async with anyio.create_task_group() as tasks:
        for number in (2, 1):
            tasks.start_soon(use, number)
        await anyio.sleep(1)
        slots.set_limit(3)
        assert slots.in_use == 5
        for _ in range(2):
            slots.release()
        await anyio.sleep(1)
        assert (served, slots.in_use) == ([], 3)
        slots.release()
        await anyio.sleep(1)
        assert (served, slots.in_use) == ([1], 3)
        slots.release()
    assert (served, slots.in_use) == ([1, 2], 3)


@pytest.mark.virtual_clock
async def test_a_greater_limit_serves_the_oldest_waiters_at_once() -> None:
    """As many as there are new slots, and nobody else can take these."""
    slots = OrderedSlots(1)
    assert slots.acquire_nowait()
    served: list[int] = []

    async def use(number: int) -> None:
        await slots.acquire((number, 0))
        served.append(number)

    async with anyio.create_task_group() as tasks:
        for number in (3, 1, 2):
            tasks.start_soon(use, number)
        await anyio.sleep(1)
        slots.set_limit(3)
        assert not slots.acquire_nowait()
        await anyio.sleep(1)
        assert served == [1, 2]
        slots.set_limit(10)
    assert (served, slots.in_use) == ([1, 2, 3], 4)
    with pytest.raises(ValueError, match="at least 1"):
        slots.set_limit(0)


@pytest.mark.parametrize("seed", range(50))
def test_changing_limits_lose_no_slot_and_strand_nobody(seed: int) -> None:
    """Whatever the limit does and whoever is cancelled, all waiters are served and all slots are free in the end."""
    rng = random.Random(seed)
    served: list[int] = []

    async def main() -> int:
        slots = OrderedSlots(2)

        async def use(number: int) -> None:
            with anyio.move_on_after(5 if number % 4 == 0 else None):
                await slots.acquire((number, 0))
                try:
                    await anyio.sleep(rng.uniform(0.1, 2))
                finally:
                    slots.release()
                served.append(number)

        async def change() -> None:
            for _ in range(20):
                await anyio.sleep(0.5)
                slots.set_limit(rng.randrange(1, 6))
                assert slots.in_use <= 6

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(change)
            for number in range(24):
                tasks.start_soon(use, number)
        assert slots.waiting == 0
        return slots.in_use

    assert run_virtual(main, seed=seed) == 0
    assert {number for number in range(24) if number % 4} <= set(served)
