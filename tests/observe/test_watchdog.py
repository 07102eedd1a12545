"""One word when nothing happens for long, and never one too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.events import Notice, StepFinished
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import Deadlock, ScriptedLearner, ScriptedPublisher, ScriptedSampler
from asyncrl.types import Message, Trajectory
from tests.faults.case import Case, One, with_tool

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")


def _told(case: Case) -> list[Any]:
    return case.notices("nothing_advances")


def _slow(request: SegmentRequest) -> float:
    return 500.0 if request.trajectory_id == "000001-001" else 1.0


def test_who_is_waited_for_is_named_once() -> None:
    """A sampling request of one member takes long; its server, as far as it is known, and since when."""
    case = Case(sampler=ScriptedSampler(seconds=_slow))
    case.play(3)
    assert _told(case) == [
        {
            "waits_for": "a sampling request",
            "trajectory": "000001-001",
            "group": 1,
            "member": 1,
            "attempt": 1,
            "turn": 1,
            "seconds": 121.0,
            "running_members": 1,
        }
    ]


def test_a_tool_is_named_with_its_turn() -> None:
    """Three minutes in one call."""

    @rl.tool
    async def work() -> str:
        await anyio.sleep(180)
        return "done"

    case = Case(with_tool(work))
    case.play(1)
    [told] = _told(case)
    assert (told["waits_for"], told["turn"], told["running_members"]) == ("tool work", 1, 4)


@pytest.mark.parametrize("method", ["reset", "on_turn", "reward"])
def test_a_call_of_the_environment_is_named(method: str) -> None:
    """Which of its methods."""

    class Slow(One):
        open = 0

    async def slow(self: One, *args: Any) -> Any:
        await anyio.sleep(180)
        return await getattr(One, method)(self, *args)

    setattr(Slow, method, slow)
    case = Case(Slow)
    case.play(1)
    assert _told(case)[0]["waits_for"] == f"environment's {method}"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (lambda: {"learner": ScriptedLearner(train_s=300.0)}, "the learner"),
        (
            lambda: {"publisher": ScriptedPublisher(seconds=iter([0.0, 300.0, 0.0]).__next__)},
            "the publication of version 1",
        ),
    ],
)
def test_the_trainers_side_is_named_too(parts: Callable[[], Any], words: str) -> None:
    """Nobody samples: the learner or the servers are waited for."""
    case = Case(**parts())
    case.play(2)
    assert _told(case)[0]["waits_for"] == words


def test_a_long_step_is_no_silence_if_steps_are_long() -> None:
    """Requests of 200 seconds are the usual here: three times the median step is 600."""
    times = iter([1.0] * 4 + [200.0] * 40)
    case = Case(sampler=ScriptedSampler(seconds=lambda request: next(times)), learner=ScriptedLearner(train_s=30.0))
    case.play(8)
    late = [event.time for event in case.of(Notice)]
    ends = [event.time for event in case.of(StepFinished)]
    assert len(late) == 1
    assert late[0] < ends[1]


def test_it_speaks_again_only_after_something_advanced() -> None:
    """Two silences with events between them: two notices, however long each is."""
    times = iter([1.0] * 3 + [150.0] + [1.0] * 3 + [600.0])
    case = Case(sampler=ScriptedSampler(seconds=lambda request: next(times)))
    case.play(2)
    assert len(_told(case)) == 2


def test_a_deadlock_on_a_virtual_clock_is_still_one() -> None:
    """The watchdog speaks, and then nothing keeps the clock alive."""

    class Stuck(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            await anyio.Event().wait()
            return None

    case = Case(Stuck)
    with pytest.raises(Deadlock):
        case.play(1)
    [told] = _told(case)
    assert told["waits_for"] == "environment's on_turn"


def test_an_evaluation_is_something_that_advances_and_is_no_step() -> None:
    """Its members are watched as well, and its duration does not count as a step's (FAILURES.md 78)."""
    case = Case(
        sampler=ScriptedSampler(seconds=lambda request: 100.0 if request.trajectory_id.startswith("eval") else 1.0),
        evaluator=rl.Evaluator(rows=list(range(20)), every=1, group_size=2),
        engine={"schedule": rl.Schedule(concurrency=4)},
    )
    case.play(4)
    assert _told(case) == []
    assert case.steps[-1].metrics["evaluation/seconds"] >= 1000.0
    assert all(step.metrics["train/batch_seconds"] < 10 for step in case.steps)
