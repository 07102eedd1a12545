"""One word when nothing happens for long, and never one too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.events import (
    BatchTaken,
    ChunkTrained,
    Events,
    LearnerStepped,
    Notice,
    StepFinished,
    VersionCommitted,
    VersionPublished,
)
from asyncrl.observe.watchdog import Watchdog
from asyncrl.rollout.progress import Activities
from asyncrl.sampling.backend import SamplingBackend
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import Deadlock, ScriptedLearner, ScriptedPublisher, ScriptedSampler, run_virtual
from asyncrl.types import Message, Segment, Trajectory
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
    """Its members are watched as well, and its duration does not count as a step's."""
    case = Case(
        sampler=ScriptedSampler(seconds=lambda request: 100.0 if request.trajectory_id.startswith("eval") else 1.0),
        evaluator=rl.Evaluator(rows=list(range(20)), every=1, group_size=2),
        engine={"schedule": rl.Schedule(concurrency=4)},
    )
    case.play(4)
    assert _told(case) == []
    assert case.steps[-1].metrics["evaluation/seconds"] >= 1000.0
    assert all(step.metrics["train/batch_seconds"] < 10 for step in case.steps)


class _Where(SamplingBackend):
    """Knows on which server each trajectory is."""

    def __init__(self, call: tuple[float, str] | None = None) -> None:
        self._call = call

    def server_of(self, trajectory: str) -> str | None:
        return f"http://s{trajectory[-1]}" if trajectory.startswith("t") else None

    def oldest_call(self) -> tuple[float, str] | None:
        return self._call

    async def sample(self, request: SegmentRequest) -> Segment:
        raise NotImplementedError


_DOINGS = {
    "reset": "environment's reset",
    "queue": "a place among the sampling requests",
    "sampling": "a sampling request",
    "on_turn": "environment's on_turn",
    "reward": "environment's reward",
}


@settings(derandomize=True, max_examples=80, deadline=None)
@given(
    members=st.lists(st.tuples(st.sampled_from([*_DOINGS]), st.integers(0, 100)), max_size=12),
    training=st.sampled_from([None, "pass", "part", "step", "done", "no gradient"]),
    published=st.integers(0, 3),
    call=st.booleans(),
)
def test_the_few_oldest_waits_are_all_named(  # noqa: C901  one branch for each kind of wait
    members: list[tuple[Any, int]], training: str | None, published: int, call: bool
) -> None:
    """Members with their server, the learner in whatever it does, and the oldest version that is not published."""
    told: list[Any] = []

    async def main() -> None:
        events, activities = Events(), Activities()
        events.subscribe(told.append, kinds=(Notice,))
        where = _Where((4.0, "http://s0/load_lora_adapter") if call else None)
        watchdog = Watchdog(events, activities, groups_per_step=2, sampler=where)
        for number, (doing, since) in enumerate(members):
            traj = Trajectory(id=f"t{number}", group=0, member=number, row=None, seed=0)
            activities[traj.id] = (traj, doing, float(since))
        for version in range(1, 4):
            watchdog.observe(VersionCommitted(time=10.0 * version, version=version))
        if published:
            watchdog.observe(VersionPublished(time=35.0, version=published, seconds=1.0, probe_error=0.0))
        if training is not None:
            groups = (0,) if training == "part" else (0, 1)
            watchdog.observe(BatchTaken(time=40.0, n=4, version=3, groups=groups))
            if training in ("part", "step", "done"):
                watchdog.observe(ChunkTrained(time=45.0, n=4, sequences=2, tokens=4, seconds=5.0))
            if training == "done":
                watchdog.observe(LearnerStepped(time=46.0, n=4, seconds=1.0))
            if training == "no gradient":
                watchdog.observe(StepFinished(time=47.0, n=4, model_step=3, metrics={}))
        await anyio.sleep(300)
        told.append(watchdog._notice(anyio.current_time()))

    run_virtual(main)
    waits = [
        (float(since), f"{_DOINGS[doing]} of t{number} in turn {0 if doing == 'on_turn' else 1}", doing, number)
        for number, (doing, since) in enumerate(members)
    ]
    expected = sorted(waits, key=lambda wait: wait[0])[:5]
    words = [
        (since, text + (f" at http://s{str(number)[-1]}" if doing == "sampling" else ""))
        for since, text, doing, number in expected
    ]
    if training in ("pass", "step"):
        words.append((40.0, "the learner") if training == "pass" else (45.0, "the learner's optimizer step"))
    if published < 3:
        place = " at http://s0/load_lora_adapter" if call else ""
        words.append((35.0 if published else 10.0, f"the publication of version {published + 1}{place}"))
    words.sort(key=lambda wait: wait[0])
    [notice] = told
    assert notice.keys["running_members"] == len(members)
    if not words:
        assert notice.keys["waits_for"] == "the caller's loop"
        return
    assert notice.keys["seconds"] == round(300.0 - words[0][0], 1)
    assert words[0][1].startswith(str(notice.keys["waits_for"]))
    assert notice.keys.get("others", []) == [f"{text}, for {300.0 - since:.1f} s" for since, text in words[1:]]
