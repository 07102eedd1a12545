"""User code that computes or never returns: it is killed or left behind, and the event loop is not held."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError, RolloutTimeout
from asyncrl.events import Events, Notice, StepFinished
from asyncrl.observe.lag import LoopLag
from asyncrl.rollout.calls import _abandoned_calls, call_user
from asyncrl.rollout.processes import _pool, in_process
from asyncrl.rollout.tools import tool
from asyncrl.testing import ByteRenderer, scripted_policy
from asyncrl.types import Message, Row, Trajectory
from tests.faults.case import One

pytestmark = pytest.mark.timeout(120)


@in_process(timeout=0.3)
def spin(x: int) -> int:
    """Never returns, unless ``x`` is even."""
    while x % 2:
        pass
    return x


@in_process
def where(*, extra: int = 0) -> int:
    """In which process, plus ``extra``."""
    return os.getpid() + extra


@in_process
def die() -> None:
    """End the process."""
    os._exit(3)


@in_process
def fail(what: str) -> None:
    """Raise."""
    raise KeyError(what)


@in_process(timeout=60.0)
def _endless() -> None:
    while True:
        time.sleep(0.01)


@rl.tool
@in_process(timeout=5.0)
def shout(text: str) -> str:
    """Say it louder."""
    return f"{text.upper()} {os.getpid() != 0}"


@pytest.mark.slow
async def test_every_worker_that_hangs_is_killed_and_replaced() -> None:
    """Twice as many endless verifiers as workers; later ones are right, in the time they need."""
    size = int(_pool().limiter.total_tokens)
    late: list[RolloutTimeout] = []

    async def verify() -> None:
        try:
            await spin(1)
        except RolloutTimeout as error:
            late.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(2 * size):
            tasks.start_soon(verify)
    assert len(late) == 2 * size
    assert str(late[0]) == "spin ran past its deadline of 0.3 s"
    assert [await spin(x) for x in (2, 4, 6)] == [2, 4, 6]
    assert _pool().limiter.borrowed_tokens == 0


@pytest.mark.slow
async def test_a_worker_is_another_process_and_is_used_again() -> None:
    """Keyword arguments arrive; the next call starts nothing."""
    first = await where()
    assert first != os.getpid()
    assert await where(extra=1) == first + 1


@pytest.mark.slow
async def test_what_goes_wrong_in_a_worker_is_told_apart() -> None:
    """A process that dies is the machinery's fault, an exception is the function's own; the pool goes on."""
    with pytest.raises(rl.InfrastructureError, match="die: its process ended"):
        await die()
    with pytest.raises(KeyError, match="no such answer"):
        await fail("no such answer")
    assert await where() != os.getpid()


@pytest.mark.slow
async def test_a_cancelled_call_leaves_no_process_behind() -> None:
    """Whether the worker is starting or computing."""
    for seconds in (0.01, 1.0):
        with anyio.move_on_after(seconds) as scope:
            await _endless()
        assert scope.cancelled_caught
    assert _pool().limiter.borrowed_tokens == 0
    assert len(_children()) <= 1  # one that is idle


def _children() -> list[str]:
    return [child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()]


@pytest.mark.slow
async def test_a_tool_can_run_in_a_process() -> None:
    """The signature stays what the model is told."""
    assert shout.parameters["properties"] == {"text": {"type": "string"}}
    assert await shout.run({"text": "hi"}) == "HI True"


class _Grader:
    def verify(self) -> bool:
        return True

    @staticmethod
    def check() -> bool:
        return True

    @classmethod
    def build(cls) -> bool:
        return True


def _local() -> Any:
    def local() -> None:
        pass

    return local


async def _waits() -> None:
    pass


async def _waits_for_each() -> AsyncGenerator[int, None]:
    yield 1


def _each() -> Generator[int, None, None]:
    yield 1


TOP_LEVEL = "must stand at the top level of a module"


@pytest.mark.parametrize("timeout", [None, 1.0])
@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (_local(), TOP_LEVEL),
        (lambda: 1, TOP_LEVEL),
        (_Grader().verify, f"is a method.*{TOP_LEVEL}"),
        (_Grader.verify, TOP_LEVEL),
        (_Grader.check, TOP_LEVEL),
        (_Grader.build, f"is a method.*{TOP_LEVEL}"),
        (_Grader.__dict__["check"], f"is a method.*{TOP_LEVEL}"),
        (_Grader.__dict__["build"], f"is a method.*{TOP_LEVEL}"),
        (_Grader, f"was not written with `def`.*{TOP_LEVEL}"),
        (math.sqrt, f"was not written with `def`.*{TOP_LEVEL}"),
        ("abc".upper, TOP_LEVEL),
        (functools.partial(math.pow, 2.0), f"was not written with `def`.*{TOP_LEVEL}"),
        (functools.lru_cache(_local()), TOP_LEVEL),
        (shout, TOP_LEVEL),
        (_waits, "`async def`.*await it as it is, or write `def`"),
        (_waits_for_each, "`async def`"),
        (where, "`async def`"),
        (_each, "a generator.*return a list"),
    ],
    ids=lambda value: getattr(value, "__qualname__", type(value).__name__) if callable(value) else "",
)
def test_what_could_not_run_in_a_worker_is_refused(function: Any, instead: str, timeout: float | None) -> None:
    """When it is declared, with what to write instead."""
    with pytest.raises(ConfigError, match=f"rl.in_process cannot run .*{instead}"):
        in_process(function) if timeout is None else in_process(timeout=timeout)(function)


def test_a_deadline_is_a_positive_number() -> None:
    """The message names the function."""
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="timeout of _each"):
            in_process(timeout=wrong)(_each)


@pytest.mark.slow
async def test_a_function_of_a_recipes_file_is_found_by_its_file(tmp_path: Path) -> None:
    """Such a module has a name that no other process can import."""
    from asyncrl.recipe.references import resolve

    (tmp_path / "env.py").write_text(
        "import asyncrl as rl\n\n@rl.in_process\ndef double(x):\n    return 2 * x\n", encoding="utf-8"
    )
    double: Any = resolve("env.factory", "env.py:double", tmp_path)
    assert await double(21) == 42


# plain functions: in a thread


async def test_a_plain_function_can_be_a_tool() -> None:
    """It runs in a thread, with its environment if it is a method."""
    seen: list[int] = []

    class Sync(rl.Env):
        @tool
        def look(self, word: str) -> str:
            """Look it up."""
            seen.append(threading.get_ident())
            return word[::-1]

        def reset(self, row: Row) -> list[Message]:
            return []

        def reward(self, traj: Trajectory, row: Row) -> float:
            return 0.0

    [look] = Sync.tools
    assert await look.run({"word": "abc"}, Sync()) == "cba"
    assert seen[0] != threading.get_ident()


async def test_a_plain_tool_that_hangs_ends_at_its_deadline() -> None:
    """Its thread cannot be ended, but nobody waits for it any longer."""
    release = threading.Event()

    @tool(timeout=0.05)
    def hang() -> str:
        release.wait()
        return ""

    try:
        with pytest.raises(RolloutTimeout, match="tool 'hang' ran past its deadline"):
            await hang.run({})
    finally:
        release.set()


async def test_threads_that_are_lost_for_ever_are_told_with_their_functions() -> None:
    """No call waits for a thread that never comes; one that ends is a thread again."""
    release = threading.Event()
    begun = threading.Semaphore(0)

    def verify() -> None:
        begun.release()
        release.wait()

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(32):
                tasks.start_soon(call_user, verify)
            for _ in range(32):
                await anyio.to_thread.run_sync(begun.acquire)
            tasks.cancel_scope.cancel()
        with pytest.raises(rl.InfrastructureError, match=r"all 32 are held by calls .*verify \(32\).*rl\.in_process"):
            await call_user(verify)
    finally:
        release.set()
    with anyio.fail_after(10):
        while len(_abandoned_calls()) == 32:
            await anyio.to_thread.run_sync(time.sleep, 0.01)
    assert await call_user(lambda: 3) == 3


class _Blocking(rl.Env):
    """A reward that blocks for 0.6 seconds."""

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    def reward(self, traj: Trajectory, row: Row) -> float:
        time.sleep(0.6)
        return float(traj.member)


@pytest.mark.slow
async def test_a_reward_that_blocks_does_not_hold_the_loop() -> None:
    """Eight of them at once in threads: nobody else waits."""
    events = Events()
    steps: list[StepFinished] = []
    events.subscribe(steps.append, kinds=(StepFinished,))  # type: ignore[arg-type]
    await _train(_Blocking, events)
    assert len(steps) == 1
    assert steps[0].metrics["loop/lag_max_seconds"] < 0.5


async def _train(env: type[rl.Env], events: Events) -> None:
    engine = rl.RolloutEngine(scripted_policy(), env=env, renderer=ByteRenderer())
    trainer = rl.AsyncTrainer(
        engine=engine, optimizer=rl.Adam(lr=1e-3), groups_per_step=2, group_size=4, max_staleness=0, events=events
    )
    async for _ in trainer.run([0, 1], steps=1):
        await anyio.sleep(0.1)


# the loop's lag


class _Holding(One):
    """An asynchronous reward that holds the loop for a second, once."""

    async def reward(self, traj: Trajectory, row: Row) -> float:
        await anyio.sleep(0.2)
        if (traj.group, traj.member) == (0, 0):
            time.sleep(1.0)  # noqa: ASYNC251  the mistake that is to be found
        return float(traj.member)


@pytest.mark.slow
async def test_who_holds_the_loop_is_named() -> None:
    """The gauge says how long, the notice which function."""
    events = Events()
    seen: list[Any] = []
    events.subscribe(seen.append, kinds=(Notice, StepFinished))
    await _train(_Holding, events)
    [held] = [event for event in seen if isinstance(event, Notice) and event.name == "loop_held"]
    assert str(held.keys["function"]).startswith("_Holding.reward (")
    assert "test_processes.py" in str(held.keys["function"])
    assert held.keys["seconds"] >= 0.8  # type: ignore[operator]
    [step] = [event for event in seen if isinstance(event, StepFinished)]
    assert step.metrics["loop/lag_max_seconds"] >= 0.9


@pytest.mark.slow
async def test_a_function_is_named_again_only_if_it_is_twice_as_bad() -> None:
    """Three times as long as allowed, thrice: one notice; then for longer: another one."""
    events = Events()
    notices: list[Any] = []
    events.subscribe(notices.append)

    def hold(seconds: float) -> None:
        time.sleep(seconds)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(LoopLag(events).run)
        for seconds in (0.5, 0.5, 1.3):
            await anyio.sleep(0.15)
            hold(seconds)
        await anyio.sleep(0.15)
        tasks.cancel_scope.cancel()
    assert [round(event.keys["seconds"], 1) >= least for event, least in zip(notices, (0.4, 1.1), strict=True)] == [
        True,
        True,
    ]


async def test_a_failed_call_has_the_name_of_the_function() -> None:
    """Whatever it is wrapped in."""

    async def search() -> None:
        raise ConnectionResetError("gone")

    with pytest.raises(rl.InfrastructureError, match="search: ConnectionResetError: gone"):
        await call_user(search)
