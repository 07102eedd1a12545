"""What becomes of failures of tools, environments and rewards: members and groups fail as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.errors import RolloutTimeout
from asyncrl.events import EvaluationFinished, Events, GroupConsumed, GroupDropped, GroupRerolled, MemberFailed
from asyncrl.rollout.tools import tool
from asyncrl.testing import END, ByteRenderer, ScriptedLearner, ScriptedSampler, run_virtual, scripted_policy
from asyncrl.types import DropReason, Message, Row, Trajectory
from tests.faults.case import AGAIN, Case, HermesRenderer, One, with_tool

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")


def _tool(work: Callable[[], Any]) -> type[One]:
    return with_tool(tool(timeout=30.0)(_named(work)))


def _named(work: Callable[[], Any]) -> Any:
    async def run() -> str:
        return str(await work())

    run.__name__ = "work"
    return run


# tool raises: message to the model, counted; the machinery's failures fail the member, are retried, end the run


def test_a_tool_that_raises_is_text_for_the_model_and_counted() -> None:
    """The trajectory goes on and is trained."""

    async def work() -> str:
        raise KeyError("no such page")

    case = Case(_tool(work))
    case.play(1)
    assert case.steps[0].metrics["rollout/tool_errors"] == 4.0
    assert all("no such page" in str(traj.messages[2]["content"]) for traj in case.steps[0].trajectories)
    assert case.of(MemberFailed) == []
    case.assert_exactly_once()


@pytest.mark.parametrize("kind", [rl.InfrastructureError, TimeoutError, ConnectionResetError])
def test_a_tool_whose_machinery_fails_is_retried_with_a_fresh_environment(kind: type[Exception]) -> None:
    """It is not the model's fault; the cause is kept, and the second attempt is trained."""
    calls = Counter[str]()

    async def work() -> str:
        calls["work"] += 1
        if calls["work"] == 1:
            raise kind("the sandbox is gone")
        return "done"

    case = Case(_tool(work))
    case.play(1)
    [failed] = case.of(MemberFailed)
    assert (failed.attempt, "the sandbox is gone" in failed.error) == (1, True)
    [again] = [traj for traj in case.steps[0].trajectories if traj.attempt == 2]
    assert (again.group, again.member, again.reward is not None) == (failed.group, failed.member, True)
    case.assert_exactly_once()


def test_a_tool_whose_machinery_stays_broken_ends_the_run_with_the_first_error() -> None:
    """Within seconds, whatever the number of rows."""
    calls = Counter[str]()

    async def work() -> str:
        calls["work"] += 1
        raise rl.InfrastructureError(f"failure {calls['work']}")

    case = Case(_tool(work), learner=ScriptedLearner(), max_staleness=2)
    with pytest.raises(rl.InfrastructureError) as caught:
        case.play(100, rows=1000)
    assert str(caught.value) == "failure 1"
    assert "8 attempts in a row failed" in str(caught.value.__notes__)
    assert case.events[-1].time < 30


# tool or env never returns: deadline per call; slot freed; close() still runs, bounded


def _hang_once(name: str) -> type[One]:
    """An environment whose method ``name`` never returns the first time."""
    hung = Counter[str]()

    class Hanging(One):
        open = 0

    async def hang(self: One, *args: Any) -> Any:
        hung[name] += 1
        if hung[name] == 1:
            await anyio.sleep_forever()
        return await getattr(One, name)(self, *args)

    setattr(Hanging, name, hang)
    return Hanging


@pytest.mark.parametrize("name", ["reset", "on_turn", "reward"])
def test_an_environment_that_never_returns_frees_its_slot_at_the_deadline(name: str) -> None:
    """One call hangs for ever with one slot; the run goes on after 30 s."""
    env = _hang_once(name)
    case = Case(env, engine={"environment_timeout": 30.0, "schedule": rl.Schedule(concurrency=1)})
    case.play(2)
    [failed] = case.of(MemberFailed)
    assert failed.time == 30.0
    assert "RolloutTimeout" in failed.error
    assert env.open == 0
    assert case.steps[-1].metrics["ledger/failed_attempts"] == 1.0
    case.assert_exactly_once()


def test_a_tool_that_never_returns_ends_at_its_own_deadline() -> None:
    """Ten seconds here; the member is tried again, and the others do not wait."""
    hung = Counter[str]()

    @tool(timeout=10.0)
    async def work() -> str:
        hung["work"] += 1
        if hung["work"] == 1:
            await anyio.sleep_forever()
        return "done"

    case = Case(with_tool(work))
    case.play(1)
    [failed] = case.of(MemberFailed)
    assert (failed.time, "tool 'work' ran past its deadline of 10.0 s" in failed.error) == (10.0, True)
    case.assert_exactly_once()


def test_a_trajectory_has_a_deadline_of_its_own() -> None:
    """Calls that each end in time, for ever: the member fails with the trajectory's deadline."""
    begun = Counter[int]()

    class Endless(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            await anyio.sleep(5)
            begun[traj.attempt] += traj.turns == 1
            return None if (traj.group, traj.member, traj.attempt) != (0, 0, 1) else [{"role": "user", "content": "on"}]

    case = Case(Endless, engine={"trajectory_timeout": 60.0, "budget": rl.Budget(max_turns=1000)})
    case.play(1)
    [failed] = case.of(MemberFailed)
    assert (failed.time, failed.attempt) == (60.0, 1)
    assert failed.error.startswith("RolloutTimeout: trajectory 000000-000 ran past its deadline of 60.0 s, at ")
    assert failed.error.endswith(" in Endless.on_turn")
    assert Endless.open == 0
    case.assert_exactly_once()


@pytest.mark.parametrize("fate", ["hangs", "raises"])
def test_a_close_that_goes_wrong_is_told_and_changes_nothing(fate: str) -> None:
    """It is given ten seconds; the trajectories are trained, and the run goes on."""

    class Bad(One):
        async def close(self) -> None:
            if fate == "raises":
                raise OSError("the directory is gone")
            await anyio.sleep_forever()

    case = Case(Bad, engine={"schedule": rl.Schedule(concurrency=1)})
    case.play(1)
    told = case.notices("environment_not_closed")
    assert [notice["times"] for notice in told] == [1]
    assert str(told[0]["error"]).startswith("RolloutTimeout: close() ran past" if fate == "hangs" else "OSError")
    assert case.of(MemberFailed) == []
    case.assert_exactly_once()


def test_close_runs_when_its_trajectory_failed_and_hides_no_error() -> None:
    """Both are told: the failure as the member's, the other one beside it."""

    class Bad(One):
        async def reward(self, traj: Trajectory, row: Row) -> float:
            raise KeyError("no such answer")

        async def close(self) -> None:
            raise OSError("the directory is gone")

    case = Case(Bad)
    with pytest.raises(KeyError, match="no such answer"):
        case.play(1)
    assert {event.error for event in case.of(MemberFailed)} == {"KeyError: 'no such answer'"}


# reward raises: member dropped with the error; never 0


def test_a_reward_that_raises_drops_its_member_and_never_becomes_zero() -> None:
    """One of eight; the seven others train, and the ledger has the reason."""

    class Grader(One):
        open = 0

        async def reward(self, traj: Trajectory, row: Row) -> float:
            if traj.member == 3:
                raise KeyError("no such answer")
            return float(traj.member)

    case = Case(Grader, group_size=8)
    case.play(2)
    bad = [traj for step in case.steps for traj in step.trajectories if traj.member == 3]
    assert all((traj.reward, traj.dropped) == (None, DropReason.FAILED) for traj in bad)
    assert all(len(batch) == 14 for batch in case.learner.batches)
    assert case.steps[-1].metrics["ledger/dropped_members/failed"] == 4.0
    assert case.events[-1].time < 1.0
    case.assert_exactly_once()


# every rollout fails: the run ends with the first error; never a silent wait


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("method", ["reset", "on_turn", "reward"])
def test_when_every_rollout_fails_the_run_ends_with_the_first_error(method: str, max_staleness: int) -> None:
    """User code, at any of its places: nothing is tried again, and no group comes."""
    raised: list[Exception] = []

    class Broken(One):
        open = 0

    async def fail(self: One, *args: Any) -> None:
        raised.append(LookupError(f"broken {len(raised)}"))
        raise raised[-1]

    setattr(Broken, method, fail)
    case = Case(Broken, max_staleness=max_staleness)
    with pytest.raises(LookupError) as caught:
        case.play(100, rows=100)
    assert caught.value is raised[0]
    assert case.events[-1].time < 1.0
    assert Broken.open == 0


def test_one_flaky_member_in_hundreds_does_not_end_the_run() -> None:
    """Failures in a row are counted, and one that ends well starts the count again."""
    calls = Counter[str]()

    async def work() -> str:
        calls["work"] += 1
        if calls["work"] % 50 < 3:
            raise rl.InfrastructureError("now and then")
        return "done"

    case = Case(_tool(work), max_staleness=1, groups_per_step=4, group_size=4)
    case.play(20)
    assert len(case.steps) == 20
    assert len(case.of(MemberFailed)) > 15
    case.assert_exactly_once()


def test_an_outage_of_everything_in_flight_is_one_failure() -> None:
    """Sixty-four members fail at once, eight is the limit in a row: their second attempts are trained."""

    async def work() -> str:
        if anyio.current_time() < 5:
            await anyio.sleep(5 - anyio.current_time())
            raise ConnectionResetError("the sandboxes restart")
        return "done"

    case = Case(_tool(work), groups_per_step=8, group_size=8)
    case.play(1)
    assert len(case.of(MemberFailed)) == 64
    assert {traj.attempt for traj in case.steps[0].trajectories} == {2}
    case.assert_exactly_once()


def test_a_run_can_have_a_budget_of_failures() -> None:
    """The tenth failure in all ends it, with the first of all."""
    calls = Counter[str]()

    async def work() -> str:
        calls["work"] += 1
        if calls["work"] % 5 == 0:
            raise rl.InfrastructureError(f"failure {calls['work']}")
        return "done"

    case = Case(_tool(work), engine={"failures": rl.Failures(per_run=10)})
    with pytest.raises(rl.InfrastructureError) as caught:
        case.play(1000)
    assert str(caught.value) == "failure 5"
    assert "the first of 10 failed attempts" in str(caught.value.__notes__)
    assert len(case.of(MemberFailed)) == 10


def test_failures_change_no_metrics_key() -> None:
    """A run in which members, groups and rows fail has the keys of one in which nothing does."""
    quiet = Case()
    quiet.play(2)
    loud = Case(_fails_for({1, 2}, times=100))
    loud.play(2, rows=100)
    assert loud.of(GroupDropped)
    keys = [set(step.metrics) for step in [*quiet.steps, *loud.steps]]
    assert all(key == keys[0] for key in keys)
    assert {key for key in keys[0] if key.startswith("ledger/")} == {
        "ledger/admitted_rows",
        "ledger/consumed_rows",
        "ledger/dropped_rows",
        "ledger/open_rows",
        "ledger/trained_members",
        "ledger/dropped_members/failed",
        "ledger/dropped_members/truncated",
        "ledger/dropped_members/straggler",
        "ledger/dropped_members/run_ended",
        "ledger/failed_attempts",
        "ledger/rerolled_groups",
    }


# the group: rolled out anew, then dropped, and replaced


def _fails_for(rows: set[int], *, times: int) -> type[One]:
    """Member 0 of these rows fails with its machinery, ``times`` times in all."""
    failures = Counter[int]()

    class Cursed(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            await anyio.sleep(1)
            if traj.row in rows and traj.member == 0 and failures[traj.row] < times:
                failures[traj.row] += 1
                raise rl.InfrastructureError(f"row {traj.row}")
            return None

    return Cursed


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_group_that_loses_a_member_for_good_is_rolled_out_anew(max_staleness: int) -> None:
    """All of it: no token of the first start is trained, and its tokens are counted as wasted."""
    case = Case(
        _fails_for({1}, times=2), max_staleness=max_staleness, sampler=ScriptedSampler(seconds=lambda request: 1.0)
    )
    case.play(4, rows=8)
    [rerolled] = case.of(GroupRerolled)
    assert (rerolled.group, rerolled.error) == (1, "InfrastructureError: row 1")
    again = [traj for step in case.steps for traj in step.trajectories if traj.group == 1]
    assert sorted((traj.member, traj.attempt) for traj in again) == [(0, 3), (1, 2)]
    assert case.of(GroupDropped) == []
    wasted = sum(step.metrics["sampling/wasted_tokens"] for step in case.steps)
    assert wasted >= rerolled.generated_tokens + sum(event.generated_tokens for event in case.of(MemberFailed)) > 0
    assert all(step.metrics["staleness/span_age_max"] <= max_staleness for step in case.steps)
    case.assert_exactly_once()


def test_the_others_of_a_group_that_starts_afresh_are_cut_off_where_they_are() -> None:
    """In a tool of five hundred seconds: it is cancelled, its environment is closed, and nobody waits for it."""
    cut: list[float] = []

    class Slow(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            if traj.group == 0 and traj.member == 0 and traj.attempt <= 2:
                raise rl.InfrastructureError("the sandbox is gone")
            if traj.group == 0 and traj.attempt == 1:
                try:
                    await anyio.sleep(500)
                finally:
                    cut.append(anyio.current_time())
            return None

    case = Case(Slow)
    case.play(1)
    assert len(case.of(GroupRerolled)) == 1
    assert len(cut) == 1
    assert case.events[-1].time < 10
    assert Slow.open == 0
    case.assert_exactly_once()


@pytest.mark.parametrize("order", ["completion", "admission"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_group_that_fails_again_is_dropped_and_replaced(max_staleness: int, order: str) -> None:
    """The trainer still gets full batches; the row's fate is in the ledger, with its cause."""
    case = Case(_fails_for({1, 2}, times=100), max_staleness=max_staleness, batch_order=order)
    case.play(4, rows=100)
    dropped = {event.group: (event.reason, event.error) for event in case.of(GroupDropped)}
    assert dropped == {row: ("failed", f"InfrastructureError: row {row}") for row in (1, 2)}
    assert [len(step.trajectories) for step in case.steps] == [4] * 4
    assert {traj.row for step in case.steps for traj in step.trajectories} == {0, *range(3, 10)}
    assert case.steps[-1].metrics["ledger/dropped_rows"] == 2.0
    case.assert_exactly_once()


def test_a_dropped_group_opens_the_barrier() -> None:
    """It was the one that the trainer waited for; the wait names it."""

    class Cursed(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            if traj.row == 0:
                await anyio.sleep(1000)
                raise rl.InfrastructureError("never mind")
            return None

    rules = rl.Failures(member_retries=0, group_rerolls=0)
    case = Case(
        Cursed,
        sampler=ScriptedSampler(seconds=lambda request: 1.0),
        learner=ScriptedLearner(train_s=1.0),
        max_staleness=1,
        engine={"failures": rules},
    )
    case.play(6, rows=100)
    [wait] = [wait for step in case.steps for wait in step.waits]
    assert (wait.group, wait.doing) == (0, "failing")
    assert wait.seconds > 900
    case.assert_exactly_once()


@pytest.mark.parametrize("overlap", ["auto", None, rl.ForwardBackwardBatch(min_sequences=2)])
@pytest.mark.parametrize(
    ("cursed", "sizes"),
    [({0}, [2, 2]), ({4}, [2, 2]), ({3, 4}, [2, 1]), ({0, 1, 2}, [2]), (set(range(4)), [1]), ({1, 3}, [2, 1])],
)
def test_finite_data_ends_with_what_is_left(cursed: set[int], sizes: list[int], overlap: Any) -> None:
    """Five rows in batches of two; rows that fail are missing at the end, and the run ends well."""
    case = Case(
        _fails_for(cursed, times=100), repeat_dataset=False, forward_backward_batch=overlap, engine={"failures": AGAIN}
    )
    case.play(3, rows=5)
    assert [len(step.trajectories) // 2 for step in case.steps] == sizes
    case.assert_exactly_once()


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize("seed", range(10))
def test_finite_data_with_oversampling_ends_whatever_fails(max_staleness: int, factor: float, seed: int) -> None:
    """Any of eleven rows may fail for good; every other row is trained once."""
    cursed = {row for row in range(11) if (row * 7 + seed * 5) % 4 == 0}
    case = Case(
        _fails_for(cursed, times=100),
        max_staleness=max_staleness,
        repeat_dataset=False,
        engine={"failures": AGAIN, "schedule": rl.Schedule(oversample_factor=factor, concurrency=5)},
        sampler=ScriptedSampler(seconds=lambda request: 1.0 + int(request.trajectory_id[:6]) % 3),
    )
    case.play(6, rows=11, seed=seed)
    trained = Counter(traj.row for step in case.steps for traj in step.trajectories)
    assert trained == {row: 2 for row in range(11) if row not in cursed}
    assert all(step.metrics["staleness/span_age_max"] <= max_staleness for step in case.steps)
    case.assert_exactly_once()


def test_finite_data_of_which_everything_fails_ends_with_the_first_error() -> None:
    """Also if there are fewer rows than failures in a row would need: there is nothing to show."""
    case = Case(_fails_for({0, 1}, times=100), repeat_dataset=False, engine={"failures": AGAIN})
    with pytest.raises(rl.InfrastructureError, match="row 0"):
        case.play(1, rows=2)


def test_a_row_that_fails_in_an_evaluation_is_left_out_and_counted() -> None:
    """The mean is of those that did not."""

    class Cursed(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            if traj.row == "bad":
                raise rl.InfrastructureError("no")
            return None

    case = Case(Cursed, evaluator=rl.Evaluator(rows=["good", "bad"], group_size=2), engine={"failures": AGAIN})
    case.play(1)
    for event in case.of(EvaluationFinished):
        assert (event.metrics["reward_mean"], event.metrics["failed_rows"]) == (0.5, 1.0)
    case.assert_exactly_once()


def test_rollouts_without_a_trainer_leave_out_the_group_that_failed() -> None:
    """It is reported; the others are yielded."""
    engine = rl.RolloutEngine(
        scripted_policy(sampler=ScriptedSampler(tokens=lambda request: [65, END])),
        env=_fails_for({1}, times=100),
        renderer=HermesRenderer(),
    )
    events = Events()
    dropped: list[object] = []
    events.subscribe(dropped.append, kinds=(GroupDropped,))

    async def main() -> list[int]:
        return [group.index async for group in engine.rollout([0, 1, 2], group_size=2, events=events)]

    assert sorted(run_virtual(main)) == [0, 2]
    assert len(dropped) == 1


def test_a_carried_over_straggler_that_fails_costs_its_group_nothing() -> None:
    """The first part has left, so nothing can be rolled out anew: the member is dropped with its error."""

    class Slow(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            if traj.member < 2:
                return None
            if traj.turns >= 5:
                raise RolloutTimeout("too late")
            return [{"role": "user", "content": "on"}]

    case = Case(
        Slow,
        sampler=ScriptedSampler(seconds=lambda request: 1.0),
        group_size=3,
        max_staleness=1,
        advantage=rl.Batchwise(),
        completion=rl.GroupCompletion(mode="deadline", max_straggler_tokens=4, on_stragglers="carry_over"),
        stale_policy="keep",
        allow_unbounded_staleness=True,
        engine={"failures": AGAIN},
    )
    case.play(4, rows=100)
    late = [traj for step in case.steps for traj in step.trajectories if traj.member == 2]
    assert late
    assert all(traj.dropped is DropReason.FAILED and traj.attempt == 2 for traj in late)
    assert case.of(GroupDropped) == []


@pytest.mark.parametrize("stragglers", ["carry_over", "truncate", "discard"])
@pytest.mark.parametrize("seed", range(12))
def test_a_group_that_is_lost_and_late_at_once_is_dropped_whole(seed: int, stragglers: Any) -> None:
    """A member fails for good in the moment in which another one wants more tokens than stragglers may have: nothing
    of the group is in a batch, whichever comes first; or a part is, and then it is not dropped."""

    class Racing(One):
        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            if traj.row == 1 and traj.member == 2:
                await anyio.sleep(4.0)
                raise rl.InfrastructureError("the sandbox is gone")
            if traj.turns == 1 and traj.member == 3:
                return [{"role": "user", "content": "more"}]
            return None

    completion = rl.GroupCompletion(mode="deadline", max_straggler_tokens=0, on_stragglers=stragglers)
    case = Case(
        Racing,
        # Of the straggler the first answer comes at 5, as the failure of the other one does.
        sampler=ScriptedSampler(seconds=lambda request: 5.0 if request.trajectory_id.endswith("3") else 1.0),
        engine={
            "failures": rl.Failures(member_retries=0, group_rerolls=0, consecutive=1000),
            "renderer": ByteRenderer(),
        },
        group_size=4,
        max_staleness=1,
        completion=completion,
        advantage=rl.Batchwise(),
        stale_policy="mask_span",
        allow_trajectory_loss=True,
    )
    case.play(2, 4, seed=seed)
    dropped = {event.group for event in case.of(GroupDropped)}
    consumed = {event.group for event in case.of(GroupConsumed)}
    assert not dropped & consumed
    assert [step.n for step in case.steps] == [1, 2]
