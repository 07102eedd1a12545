"""A run that learns nothing says why, and ends; a slow start does not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.errors import ConfigError, NothingTrained
from asyncrl.events import Events, Notice
from asyncrl.learning.advantages import Rewards
from asyncrl.observe.untrained import Untrained, fates
from asyncrl.testing import run_virtual
from asyncrl.types import Group, Message, Row, Trajectory
from tests.faults.case import Case, One


class _Endless(One):
    """Never says that a conversation is over."""

    open = 0

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        return [{"role": "user", "content": "more"}]


class _Equal(One):
    open = 0

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return 0.5


class _HalfBroken(One):
    """One member of each group has no reward, and the other has nothing to be compared with."""

    open = 0

    async def reward(self, traj: Trajectory, row: Row) -> float:
        if traj.member == 0:
            raise LookupError("no grade")
        return 1.0


class _Silent(rl.GroupCentered):
    """Sees no difference anywhere."""

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        return [[0.0 for _ in group] for group in rewards]


def _truncated(rule: Any) -> Case:
    return Case(
        _Endless,
        engine={"budget": rl.Budget(max_turns=2)},
        truncation=rl.Truncation(train=rule),
        allow_trajectory_loss=True,
        max_staleness=1,
    )


_CAUSES: dict[str, tuple[Callable[[], Case], tuple[str, ...]]] = {
    "truncated and dropped": (lambda: _truncated("drop"), ("were truncated by turns and dropped",)),
    "truncated and left out": (
        lambda: _truncated("drop_and_exclude_from_baseline"),
        ("were truncated by turns and dropped",),
    ),
    "equal rewards": (lambda: Case(_Equal), ("have the reward of their whole group (0.5)",)),
    "no advantage": (lambda: Case(advantage=_Silent()), ("have advantage 0",)),
    "failed": (
        lambda: Case(
            _HalfBroken,
            engine={"failures": rl.Failures(consecutive=1000, retry_delay=0.0)},
            completion=rl.GroupCompletion(min_members=1),
            max_staleness=1,
        ),
        ("were dropped: failed", "have the reward of their whole group (1)"),
    ),
}


@pytest.mark.parametrize("cause", _CAUSES)
def test_a_run_that_trains_nothing_warns_and_ends_with_the_cause(cause: str) -> None:
    """One warning at first, the next when the row is twice as long; the error after a hundred batches says the same."""
    make, words = _CAUSES[cause]
    case = make()
    with pytest.raises(NothingTrained) as caught:
        case.play(500, 4)
    assert len(case.steps) == 100
    assert case.learner.batches == []
    assert [told["batches"] for told in case.notices("nothing_trained")] == [5, 10, 20, 40, 80]
    for text in (str(caught.value), str(case.notices("nothing_trained")[0]["causes"])):
        assert all(word in text for word in words), text
    assert "failures.untrained_batches, which is 100 (0: never" in str(caught.value)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_the_number_of_batches_is_an_option(most: int) -> None:
    """Counted in a row."""
    case = Case(_Equal, engine={"failures": rl.Failures(untrained_batches=most)})
    with pytest.raises(NothingTrained, match=f"{most} batches in a row"):
        case.play(50, 4)
    assert len(case.steps) == most


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_a_wrong_number_is_refused(value: Any) -> None:
    """By its key."""
    with pytest.raises(ConfigError, match=r"failures\.untrained_batches"):
        rl.Failures(untrained_batches=value)


@pytest.mark.parametrize("steps", [3, 130])
def test_it_can_be_turned_off(steps: int) -> None:
    """Then the run goes on to its end, with warnings; also a short run without any version is not silent."""
    case = Case(_Equal, engine={"failures": rl.Failures(untrained_batches=0)})
    case.play(steps, 4)
    assert len(case.steps) == steps
    told = [notice["batches"] for notice in case.notices("nothing_trained")]
    assert told == ([3] if steps == 3 else [5, 10, 20, 40, 80, 130])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(made=st.lists(st.booleans(), max_size=120), most=st.integers(0, 12), kills=st.sets(st.integers(0, 120)))
def test_the_count_is_of_batches_in_a_row_whatever_kills_come_between(
    made: list[bool], most: int, kills: set[int]
) -> None:
    """An independent count; a run that had ended for it begins anew when it is resumed."""
    told: list[Any] = []

    async def count_all() -> None:
        events, row = Events(), 0
        events.subscribe(told.append, kinds=(Notice,))
        count = Untrained(events, most=most, oldest_age=None)
        group = Group(index=0, row=None, members_G=[], seconds=0.0)
        for number, version in enumerate(made):
            if number in kills:
                count = Untrained(events, most=most, oldest_age=None, batches=count.batches)
                row = 0 if most and row >= most else row
            count.add([group], version=0, made_version=version)
            row = 0 if version else row + 1
            assert count.batches == row
            if most and row >= most:
                with pytest.raises(NothingTrained, match=f"{row} batches"):
                    count.require_some()
            else:
                count.require_some()

    run_virtual(count_all)
    assert all(notice.keys["batches"] >= 5 for notice in told)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_run_that_ends_without_any_version_has_failed(steps: int, tmp_path: Path) -> None:
    """However short it was, and again if it is resumed without anything to do; its steps are there."""

    def case() -> Case:
        return Case(_Equal, checkpointing=rl.Checkpointing(tmp_path / "run"))

    first, again = case(), case()
    with pytest.raises(
        NothingTrained, match=rf"none of its {steps} steps made a version: .* whole group \(0.5\)"
    ) as caught:
        first.play(steps, 4)
    assert "What to do: look at what the model wrote" in str(caught.value)
    assert len(first.steps) == steps
    with pytest.raises(NothingTrained, match=rf"none of its {steps} steps made a version"):
        again.play(steps, 4)
    assert again.steps == []


def test_the_reason_names_the_users_line() -> None:
    """Of members that failed, and of a tool that always does; the first error is the cause."""

    @rl.tool
    async def work() -> str:
        """Work."""
        raise LookupError("no file")

    class Tools(_Equal):
        tools = (work,)

    for env, words in (
        (_HalfBroken, "failed (LookupError at "),
        (Tools, "tool 'work' raised LookupError: no file at "),
    ):
        case = Case(env, completion=rl.GroupCompletion(min_members=1), max_staleness=1)
        with pytest.raises(NothingTrained) as caught:
            case.play(3, 4)
        assert words in str(caught.value)
        assert f"{__file__}:" in str(caught.value)
        assert isinstance(caught.value.__cause__, LookupError if env is _HalfBroken else type(None))


@pytest.mark.parametrize(("chance", "told"), [(0.1, 1), (0.9, 0)])
def test_a_run_that_made_few_versions_says_so_at_its_end(chance: float, told: int) -> None:
    """One step in ten is hardly anything."""

    class Seldom(One):
        open = 0

        async def reward(self, traj: Trajectory, row: Row) -> float:
            return float(traj.member) * (traj.group % 10 < 10 * chance)

    case = Case(Seldom, groups_per_step=1)
    case.play(20, 4)
    notices = case.notices("hardly_anything_trained")
    assert [(notice["steps"], notice["versions"]) for notice in notices] == [(20, 2)] * told


def test_a_slow_start_ends_no_run() -> None:
    """One answer in fifty is right: of 8 in a batch, most batches have no signal, and now and then one has."""
    chance = random.Random(3)

    class Rare(One):
        open = 0

        async def reward(self, traj: Trajectory, row: Row) -> float:
            return float(chance.random() < 0.02)

    case = Case(Rare, groups_per_step=2, group_size=4, max_staleness=1)
    case.play(200, 8)
    made = Counter(step.metrics["train/updated"] for step in case.steps)
    assert made[0.0] > 150
    assert len(case.steps) == 200
    assert len(case.notices("nothing_trained")) <= 4


@pytest.mark.parametrize("killed_at", [2, 4, 7])
def test_the_count_goes_on_after_a_resume(killed_at: int, tmp_path: Path) -> None:
    """A run that is stopped every few batches ends all the same, and one that had ended is tried again."""

    def case() -> Case:
        return Case(
            _Equal,
            engine={"failures": rl.Failures(untrained_batches=8)},
            checkpointing=rl.Checkpointing(tmp_path / "run"),
        )

    async def some(case: Case, most: int) -> None:
        async with aclosing(case.start(40, 4)) as run:
            async for step in run:
                case.steps.append(step)
                if len(case.steps) == most:
                    return

    first = case()
    run_virtual(some, first, killed_at)
    for already in (killed_at, 0):
        again = case()
        with pytest.raises(NothingTrained, match="8 batches in a row"):
            run_virtual(some, again, 1000)
        assert len(again.steps) == 8 - already


def test_masked_and_missing_tokens_are_causes() -> None:
    """Members that took so long that all of their tokens are older than the bound, and one that wrote nothing."""
    case = Case(groups_per_step=1)
    case.play(1, 1)
    empty = Trajectory(id="t", group=0, member=0, row=None, seed=0, reward=1.0)
    group = Group(index=0, row=None, members_G=[empty, *case.steps[0].trajectories], seconds=0.0)
    assert Counter(fates(group, oldest=1)) == {"have no token": 1, "are masked: older than max_staleness": 2}
    assert Counter(fates(group, oldest=0)) == {"have no token": 1, "have advantage 0": 2}
