"""The iterator whose work goes on between its items."""

from __future__ import annotations

import anyio
import pytest

from asyncrl.concurrency.endings import first_error
from asyncrl.concurrency.iteration import Consumer, iterate


@pytest.mark.virtual_clock
async def test_items_are_made_when_they_are_asked_for() -> None:
    """The producer is in lock-step: it waits while the caller looks at an item."""
    made: list[tuple[int, float]] = []

    async def produce(consumer: Consumer[int]) -> None:
        for number in range(3):
            await consumer.wanted()
            made.append((number, anyio.current_time()))
            await consumer.give(number)

    seen = []
    async for number in iterate(produce):
        seen.append(number)
        await anyio.sleep(10)
    assert seen == [0, 1, 2]
    assert made == [(0, 0.0), (1, 10.0), (2, 20.0)]


@pytest.mark.virtual_clock
async def test_work_goes_on_while_the_caller_looks_at_an_item() -> None:
    """A task of the producer runs during the caller's body."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await anyio.sleep(1)
            ticks.append(anyio.current_time())

    async def produce(consumer: Consumer[int]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            await consumer.wanted()
            await consumer.give(0)
            await consumer.wanted()
            tasks.cancel_scope.cancel()

    async for _ in iterate(produce):
        await anyio.sleep(3.5)
    assert ticks == [1.0, 2.0, 3.0]


@pytest.mark.virtual_clock
async def test_leaving_the_loop_ends_the_work() -> None:
    """After ``aclose`` the producer has been cancelled and its clean-up has run."""
    cleaned: list[float] = []

    async def produce(consumer: Consumer[int]) -> None:
        try:
            await consumer.wanted()
            await consumer.give(0)
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(2)
            cleaned.append(anyio.current_time())

    items = iterate(produce)
    assert await anext(items) == 0
    await items.aclose()
    assert cleaned == [2.0]


@pytest.mark.virtual_clock
async def test_cancelling_the_caller_ends_the_work() -> None:
    """A deadline around the loop reaches the producer."""
    ended: list[float] = []

    async def produce(consumer: Consumer[int]) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(anyio.current_time())

    with anyio.move_on_after(5) as scope:
        async for _ in iterate(produce):
            pass
    assert scope.cancelled_caught
    assert ended == [5.0]


@pytest.mark.virtual_clock
async def test_the_first_error_of_any_task_is_raised_as_itself() -> None:
    """Not an exception group, and not silence."""

    async def fail() -> None:
        await anyio.sleep(1)
        raise KeyError("the grader's own error")

    async def produce(consumer: Consumer[int]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            await anyio.sleep_forever()

    with pytest.raises(KeyError, match="the grader's own error"):
        async for _ in iterate(produce):
            pass
    assert anyio.current_time() == 1.0


def test_other_errors_stay_visible_as_notes() -> None:
    """The first leaf of a nested group is the error; the rest are told."""
    group = BaseExceptionGroup("", [BaseExceptionGroup("", [ValueError("one")]), TypeError("two")])
    error = first_error(group)
    assert isinstance(error, ValueError)
    assert error.__notes__ == ["and also TypeError: two"]


@pytest.mark.virtual_clock
async def test_a_producer_that_sees_its_streams_closed_waits_for_its_cancellation() -> None:
    """A caller that leaves cancels first and closes then; seeing the second first is no error of the producer's."""
    ask, asked = anyio.create_memory_object_stream[None](1)
    given, receive = anyio.create_memory_object_stream[int](1)
    consumer = Consumer(asked, given)
    ask.close()
    receive.close()
    with asked, given:
        with anyio.move_on_after(1) as wanting:
            await consumer.wanted()
        with anyio.move_on_after(1) as giving:
            await consumer.give(0)
    assert wanting.cancelled_caught
    assert giving.cancelled_caught
