"""Errors of the user's functions in whole runs: whose they are, when they end a run, and when they do not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.events import GroupDropped, MemberFailed
from asyncrl.rollout.hooks import called_hooks, failed_hook
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ScriptedSampler
from asyncrl.types import Message, Row, Trajectory, TruncationCause
from tests.faults.case import AGAIN, Case, One


class _Graded(One):
    """Three in four conversations are truncated, and rated by their number; of the others ``broken`` fail."""

    broken = 1.0
    chance = random.Random(1)

    async def reward(self, traj: Trajectory, row: Row) -> float:
        if self.chance.random() < self.broken:
            raise LookupError(f"no answer for {row}")
        return float(traj.member)


def _mostly_truncated(request: SegmentRequest) -> list[int]:
    return [65, END] if request.trajectory_id.endswith("3") else [65] * 8


def _case(env: type[One], **options: Any) -> Case:
    return Case(
        env,
        sampler=ScriptedSampler(tokens=_mostly_truncated),
        engine={"budget": rl.Budget(max_generated_tokens=3), "failures": rl.Failures(retry_delay=0.0, **options)},
        group_size=4,
        truncation=rl.Truncation(train="reward"),
    )


def test_a_reward_that_always_raises_ends_the_run_although_members_end_well() -> None:
    """After five steps, with the user's own error, its row, and the number of the option."""
    case = _case(type("Graded", (_Graded,), {"open": 0}))
    with pytest.raises(LookupError, match="no answer for 0") as caught:
        case.play(100)
    assert len(case.steps) == 5
    notes = caught.value.__notes__
    assert notes[0] == "while the environment's reward ran for row 0 (group 0, member 3)"
    assert (
        notes[1]
        == "reward failed most of its calls in 5 steps in a row, 2 of 2 in the last (failures.user_error_steps)"
    )
    assert {event.where.rpartition("/")[2].partition(":")[0] for event in case.of(MemberFailed)} == {
        "test_user_errors.py"
    }


@pytest.mark.parametrize("options", [{"user_error_steps": 0}, {}])
def test_one_that_raises_now_and_then_ends_no_run(options: dict[str, int]) -> None:
    """One call in four; or always, if it is told to go on."""
    env = type("Graded", (_Graded,), {"open": 0, "broken": 1.0 if options else 0.25, "chance": random.Random(2)})
    case = _case(env, **options)
    case.play(60)
    assert len(case.steps) == 60
    assert len(case.of(MemberFailed)) > 20


def test_a_dropped_group_has_the_line_of_the_user() -> None:
    """As its members have."""

    class Fails(One):
        open = 0

        async def reset(self, row: Row) -> list[Message]:
            if row == 1:
                raise KeyError("b")
            return await super().reset(row)

    case = Case(Fails, engine={"failures": AGAIN})
    case.play(2)
    [event] = {event.where for event in case.of(GroupDropped)}
    assert event.startswith(f"{__file__}:")
    assert event.endswith(" in Fails.reset")


@pytest.mark.parametrize("fails", [2, 1])
def test_held_out_rows_that_fail_are_told_with_their_line(fails: int) -> None:
    """All of them end the run; some are a warning."""

    class Fails(One):
        open = 0

        async def reward(self, traj: Trajectory, row: Row) -> float:
            if row >= 9 - fails:
                raise KeyError("no solution")
            return float(traj.member)

    case = Case(Fails, evaluator=rl.Evaluator(rows=[7, 8], group_size=2))
    if fails == 2:
        with pytest.raises(KeyError, match="no solution") as caught:
            case.play(1)
        assert "all 2 held-out rows failed, the first for this" in caught.value.__notes__
        assert any("the environment's reward ran for row" in note for note in caught.value.__notes__)
        return
    case.play(1)
    for keys in case.notices("evaluation_failures"):
        assert (keys["failed_rows"], keys["rows"], keys["error"]) == (1, 2, "KeyError: 'no solution'")
        assert str(keys["where"]).startswith(f"{__file__}:")
    assert len(case.notices("evaluation_failures")) == 2


_HOOKS = ("reset", "on_turn", "reward", "on_truncated")


@given(st.sampled_from(_HOOKS), st.integers(1, 3), st.booleans())
def test_the_trajectory_says_which_function_failed(hook: str, turns: int, infrastructure: bool) -> None:
    """Whichever it is, after any number of turns; what the machinery failed is not counted as the user's."""

    class Fails(One):
        open = 0

        def _fail(self, name: str) -> None:
            if name == hook:
                raise rl.InfrastructureError("x") if infrastructure else KeyError("x")

        async def reset(self, row: Row) -> list[Message]:
            self._fail("reset")
            return await super().reset(row)

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            if traj.turns == turns:
                self._fail("on_turn")
                return None
            return [{"role": "user", "content": "on"}]

        async def reward(self, traj: Trajectory, row: Row) -> float:
            self._fail("reward")
            return 0.0

        async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
            self._fail("on_truncated")
            return 0.0

    case = Case(
        Fails,
        engine={
            "failures": rl.Failures(member_retries=0, group_rerolls=0, consecutive=1),
            "budget": rl.Budget(max_generated_tokens=2 if hook == "on_truncated" else 99),
        },
    )
    with pytest.raises((KeyError, rl.InfrastructureError)) as caught:
        case.play(1)
    assert any(f"the environment's {hook} ran" in note for note in caught.value.__notes__)


def test_a_sound_trajectory_has_called_what_it_shows() -> None:
    """And none has failed."""
    case = Case()
    case.play(1)
    for traj in case.steps[0].trajectories:
        assert called_hooks(traj) == {"reset": True, "on_turn": True, "reward": True}
        assert failed_hook(traj) == ""
