from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import anyio
import pytest

from asyncrl.observe.lag import LoopLag, settled_heap


def test_mean_and_longest_lateness_since_the_last_look() -> None:
    """A timer that comes early is not late."""
    lag = LoopLag()
    for late_s in (0.0, 0.25, -0.01, 0.75):
        lag.add(late_s)
    assert lag.take() == {"loop/lag_mean_seconds": 0.25, "loop/lag_max_seconds": 0.75}
    assert lag.take() == {"loop/lag_mean_seconds": 0.0, "loop/lag_max_seconds": 0.0}


@pytest.mark.virtual_clock
async def test_on_a_virtual_clock_it_ends_at_once() -> None:
    """Else a run that hangs would never be seen as deadlocked."""
    with anyio.fail_after(1):
        await LoopLag().run()
    assert anyio.current_time() == 0.0


async def test_a_callback_that_holds_the_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer is due while the loop is busy, and comes when that is over."""
    lag = LoopLag()
    times = iter([10.0, 10.3])
    sleeps: list[float] = []

    async def sleep_until(deadline: float) -> None:
        sleeps.append(deadline)

    monkeypatch.setattr(anyio, "current_time", lambda: next(times))
    monkeypatch.setattr(anyio, "sleep_until", sleep_until)
    with pytest.raises(ExceptionGroup) as caught:
        await lag.run()
    assert caught.group_contains(StopIteration)
    assert sleeps == [10.05]
    assert lag.take()["loop/lag_max_seconds"] == pytest.approx(0.25)


@pytest.fixture(autouse=True)
def heap_of_a_program() -> Iterator[None]:
    """Nothing is frozen, unlike in other tests."""
    gc.unfreeze()
    yield
    gc.freeze()


async def test_what_exists_is_not_collected_again_during_a_run() -> None:
    """And it is afterwards; a heap that somebody else froze stays as it is."""
    with settled_heap():
        assert gc.get_freeze_count() > 0
        with settled_heap():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


async def test_garbage_is_not_frozen() -> None:
    """A cycle that is no longer used is gone when the block begins."""

    class Cycle:
        def __init__(self) -> None:
            self.self = self

    gone = weakref.ref(Cycle())
    with settled_heap():
        assert gone() is None


@pytest.mark.virtual_clock
async def test_on_a_virtual_clock_the_heap_is_left_alone() -> None:
    """Thousands of short runs would each pay for a full collection."""
    with settled_heap():
        assert gc.get_freeze_count() == 0
