"""Calls that end in order: told first, cut only then; and deadlines of their own are no business of anybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.sampling.held import HeldCall, Interrupted, Told
from asyncrl.testing.clock import run_virtual

pytestmark = pytest.mark.virtual_clock


class _Other:
    """The other side of a call: notes what happens to it, in order."""

    def __init__(self, *, obeys_after: float | None = 0.0, takes_ends: bool = True, end_s: float = 0.0) -> None:
        self.seen: list[str] = []
        self._told = anyio.Event()
        self._obeys_after = obeys_after
        self._takes_ends = takes_ends
        self._end_s = end_s

    async def call(self) -> str:
        """Ends some time after it was told to, or never."""
        try:
            await self._told.wait()
            if self._obeys_after is None:
                await anyio.sleep_forever()
            else:
                await anyio.sleep(self._obeys_after)
        except asyncio.CancelledError:
            self.seen.append("cut")
            raise
        self.seen.append("ended")
        return "partial"

    def begin_end(self, told: Told) -> None:
        """Tell it, which takes a while."""
        asyncio.get_running_loop().call_later(self._end_s, self._tell, told)

    def _tell(self, told: Told) -> None:
        self.seen.append("told")
        if self._takes_ends:
            self._told.set()
        told(self._takes_ends)


async def _by_scope(held: HeldCall, other: _Other) -> None:
    with anyio.move_on_after(10) as scope:
        await held.make(other.call(), other.begin_end)
    assert scope.cancelled_caught


async def _by_group(held: HeldCall, other: _Other) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(held.make, other.call(), other.begin_end)
        await anyio.sleep(10)
        tasks.cancel_scope.cancel()


async def _by_interrupt(held: HeldCall, other: _Other) -> None:
    async def make() -> None:
        with pytest.raises(Interrupted):
            await held.make(other.call(), other.begin_end)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make)
        await anyio.sleep(10)
        held.interrupt()


_WAYS: list[Callable[[HeldCall, _Other], Awaitable[None]]] = [_by_scope, _by_group, _by_interrupt]


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("obeys_after", [0.0, 0.5])
async def test_a_call_that_obeys_is_never_cut(
    way: Callable[[HeldCall, _Other], Awaitable[None]], obeys_after: float
) -> None:
    """It is told, it ends, and its connection is sound."""
    other = _Other(obeys_after=obeys_after)
    await way(HeldCall(), other)
    assert other.seen == ["told", "ended"]
    assert anyio.current_time() == 10 + obeys_after


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize(("takes_ends", "end_s", "bound"), [(True, 0.0, 11), (False, 0.0, 10), (False, 5.0, 15)])
async def test_a_call_that_does_not_end_is_cut_a_moment_later(
    way: Callable[[HeldCall, _Other], Awaitable[None]], takes_ends: bool, end_s: float, bound: float
) -> None:
    """Who is cancelled does not wait for ever."""
    other = _Other(obeys_after=None, takes_ends=takes_ends, end_s=end_s)
    await way(HeldCall(), other)
    assert other.seen == ["told", "cut"]
    assert anyio.current_time() == bound


async def test_a_call_is_cut_if_nobody_says_that_the_other_side_was_told() -> None:
    """As when the task that should do so is gone."""
    other = _Other(end_s=1000.0)
    await _by_scope(HeldCall(), other)
    assert other.seen == ["cut"]
    assert anyio.current_time() == 16


async def test_results_and_errors_are_the_calls_own() -> None:
    """Nothing is added or lost on the way."""

    async def add(a: int, b: int) -> int:
        await anyio.sleep(1)
        return a + b

    async def fail() -> int:
        await anyio.sleep(1)
        raise ValueError("its own")

    assert await HeldCall().make(add(1, 2), _never) == 3
    with pytest.raises(ValueError, match="its own"):
        await HeldCall().make(fail(), _never)


def _never(told: Told) -> None:
    pytest.fail("nobody wanted its end")


async def _deadline() -> str:
    with anyio.move_on_after(1):
        await anyio.sleep_forever()
    return "late"


async def _failing_deadline() -> str:
    try:
        with anyio.fail_after(1):
            await anyio.sleep_forever()
    except TimeoutError:
        pass
    return "late"


async def _native_deadline() -> str:
    try:
        async with asyncio.timeout(1):
            await anyio.sleep_forever()
    except TimeoutError:
        pass
    return "late"


async def _group_inside() -> str:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep_forever)
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    return "late"


async def _giving_way() -> str:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    return await _deadline()


@pytest.mark.parametrize("call", [_deadline, _failing_deadline, _native_deadline, _group_inside, _giving_way])
async def test_deadlines_inside_of_a_call_are_its_own(call: Callable[[], Awaitable[str]]) -> None:
    """Also the tests' servers run inside of their client's task, with deadlines of theirs."""

    assert await HeldCall().make(call(), _never) == "late"  # type: ignore[arg-type]
    assert anyio.current_time() == 1


_PARTS = st.lists(
    st.tuples(st.sampled_from(["sleep", "give way", "deadline", "shield"]), st.integers(0, 4)), min_size=1, max_size=6
)


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, deadline=None)
@given(_PARTS, st.floats(0, 12), st.booleans(), st.integers(0, 2**16))
def test_whatever_a_call_is_made_of_it_ends_or_is_told_before_it_is_cut(
    parts: list[tuple[str, int]], cancelled_at: float, takes_ends: bool, seed: int
) -> None:
    """Cancelled at any moment, in any order of tasks: never cut before it was told, and never told after it ended."""
    seen: list[str] = []

    async def call() -> int:
        try:
            for kind, seconds in parts:
                if kind == "sleep":
                    await anyio.sleep(seconds)
                elif kind == "give way":
                    await anyio.lowlevel.checkpoint()
                else:
                    with anyio.move_on_after(seconds, shield=kind == "shield"):
                        await anyio.sleep_forever()
        except asyncio.CancelledError:
            seen.append("cut")
            raise
        seen.append("ended")
        return len(parts)

    def begin_end(told: Told) -> None:
        asyncio.get_running_loop().call_later(0.25, tell, told)

    def tell(told: Told) -> None:
        seen.append("told")
        told(takes_ends)

    async def main() -> int | None:
        result = None
        with anyio.move_on_after(cancelled_at):
            result = await HeldCall().make(call(), begin_end)
        await anyio.lowlevel.checkpoint()
        return result

    result = run_virtual(main, seed=seed)
    # A deadline of its own that passes while it is being ended cuts it; connections have none.
    own = [["cut"], ["cut", "told"]] if any(kind == "deadline" for kind, _ in parts) else []
    assert seen in ([], ["ended"], ["told", "ended"], ["ended", "told"], ["told", "cut"], *own)
    if result is not None:
        assert (result, seen) == (len(parts), ["ended"])
