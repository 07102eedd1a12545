"""Environments whose ``close()`` misbehaves: bounded, counted, told once, and no later one is left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncrl.events import Events, MemberFailed
from asyncrl.rollout import closing
from tests.faults.case import Case, One

CLOSED: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_closed() -> Iterator[None]:
    CLOSED.clear()
    yield
    CLOSED.clear()


class _Env(One):
    open = 0

    async def close(self) -> None:
        CLOSED.append("called")
        await self.hang()

    async def hang(self) -> None: ...


class Sleeps(_Env):
    async def hang(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            CLOSED.append("tidied")


class Shields(_Env):
    async def hang(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()


class ShieldsATaskGroup(_Env):
    async def hang(self) -> None:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(anyio.sleep_forever)


class Swallows(_Env):
    async def hang(self) -> None:
        while True:
            with suppress(anyio.get_cancelled_exc_class()):
                await anyio.sleep(3600)


class SwallowsEverything(_Env):
    async def hang(self) -> None:
        while True:
            with suppress(BaseException):
                await anyio.sleep(3600)


class FailsLate(_Env):
    async def hang(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("while it tidies up")


class Raises(_Env):
    async def hang(self) -> None:
        raise OSError("\udce9 " + "x" * 100_000)


class TidiesSlowly(_Env):
    async def hang(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.5)
            CLOSED.append("tidied")


KINDS = [Sleeps, Shields, ShieldsATaskGroup, Swallows, SwallowsEverything, FailsLate, Raises, TidiesSlowly]


# Python complains of one that ignores even that it is closed.
IGNORES_ALL = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@IGNORES_ALL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 6])
def test_a_close_that_misbehaves_is_bounded_and_told_once(kind: type[_Env], groups: int) -> None:
    """All are called; each takes eleven seconds at most; the trajectories are trained; the run ends."""
    steps, size = 2, 8
    case = Case(kind, group_size=size, groups_per_step=groups)
    case.play(steps)
    members = steps * groups * size
    assert CLOSED.count("called") == members
    assert case.of(MemberFailed) == []
    assert case.events[-1].time <= steps * (closing.CLOSE_S + 1) + 1
    told = case.notices("environment_not_closed")
    assert [notice["times"] for notice in told] == [times for times in (1, 10, 100) if times <= members]
    assert {notice["environment"] for notice in told} == {kind.__name__}
    expected = "OSError" if kind in (Raises, FailsLate) else "RolloutTimeout: close() ran past its deadline of 10.0 s"
    if kind is FailsLate:
        expected = ""
    for notice in told:
        assert str(notice["error"]).startswith(expected)
        assert len(str(notice["error"]).encode()) < 3000
    if kind in (Sleeps, TidiesSlowly):
        assert CLOSED.count("tidied") == members
    case.assert_exactly_once()


@IGNORES_ALL
@pytest.mark.parametrize("kind", [Shields, SwallowsEverything])
def test_a_run_that_is_left_ends_though_a_close_never_does(kind: type[_Env]) -> None:
    """Its environments are closed, or given up, before the loop over it ends."""

    class Endless(kind):  # type: ignore[valid-type, misc]
        open = 0

        async def on_turn(self, traj: Any) -> Any:
            if traj.group >= 2:
                await anyio.sleep_forever()

    case = Case(Endless, max_staleness=2)
    case.play(1)
    assert CLOSED.count("called") >= 4
    assert case.events[-1].time < 30


async def test_plain_closes_that_hang_take_no_thread_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty hang; the others are closed in threads of their own, and those of the calls into environments are free."""
    monkeypatch.setattr(closing, "CLOSE_S", 0.2)
    held = threading.Event()

    class Hangs(One):
        open = 0

        def close(self) -> None:  # type: ignore[override]
            CLOSED.append("called")
            held.wait()

    class Plain(One):
        open = 0

        def close(self) -> Any:
            async def rest() -> None:
                CLOSED.append("awaited")

            time.sleep(0)
            return rest()

    closer, events = closing.Closing(), Events()
    told: list[Any] = []
    events.subscribe(told.append)
    async with anyio.create_task_group() as tasks:
        for index in range(40):
            tasks.start_soon(closer.close, Hangs(), str(index), events)
    async with anyio.create_task_group() as tasks:
        for index in range(40):
            tasks.start_soon(closer.close, Plain(), str(index), events)
    assert CLOSED.count("called") == CLOSED.count("awaited") == 40
    assert [notice.keys["times"] for notice in told] == [1, 10]
    monkeypatch.setattr(closing, "_THREADS", 40)
    await closer.close(Hangs(), "41", events)
    assert "no thread is left for close()" in str(told[-1].keys["error"])
    held.set()
    for thread in threading.enumerate():
        if thread.name == "asyncrl close":
            await anyio.to_thread.run_sync(thread.join)
    await anyio.lowlevel.checkpoint()
    await closer.close(Plain(), "42", events)
    assert CLOSED.count("awaited") == 41


async def test_a_close_in_order_is_awaited_and_not_told() -> None:
    """In its caller's time, also within a scope that is cancelled."""

    class Orderly(_Env):
        async def hang(self) -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep, 0.001)
            await anyio.lowlevel.checkpoint()
            CLOSED.append("tidied")

    events = Events()
    told: list[Any] = []
    events.subscribe(told.append)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await closing.Closing().close(Orderly(), "0", events)
    assert CLOSED == ["called", "tidied"]
    assert told == []
