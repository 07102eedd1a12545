"""Groups on the virtual clock: when they are complete, and what becomes of stragglers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.events import DeadlinePassed, Event, Events, GroupFinished, MemberDiscarded
from asyncrl.rollout.groupplan import FailedGroup
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ByteRenderer, ScriptedSampler, run_virtual, scripted_policy
from asyncrl.types import DropReason, Group, Message, Row, Trajectory, TruncationCause


class _Turns(rl.Env):
    """Member m needs ``turns[m]`` turns; the tool between two takes ``tool_s`` seconds."""

    def __init__(self, turns: list[int], tool_s: float) -> None:
        self._turns = turns
        self._tool_s = tool_s

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        if traj.turns >= self._turns[traj.member]:
            return None
        await anyio.sleep(self._tool_s)
        return [{"role": "user", "content": "on"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.member)

    async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
        return -1.0


def _first_two_last(request: SegmentRequest) -> float:
    """Members 0 and 1 take a second for a request, the others a little less, so that no two end together."""
    return 1.0 if request.trajectory_id[-1] in "01" else 0.9


class _Case:
    """One group, with 4 tokens in a turn."""

    def __init__(
        self,
        turns: list[int],
        *,
        tool_s: float = 0.0,
        seconds: Callable[[SegmentRequest], float] = _first_two_last,
        concurrency: int = 64,
        **completion: Any,
    ) -> None:
        self.sampler = ScriptedSampler(seconds=seconds, tokens=lambda request: [65, 66, 67, END])
        self.events: list[Event] = []
        self.parts: list[Group] = []
        self.part_times: list[float] = []
        self._size = len(turns)
        self._completion = rl.GroupCompletion(**completion)
        self._engine = rl.RolloutEngine(
            scripted_policy(sampler=self.sampler),
            env=lambda: _Turns(turns, tool_s),
            renderer=ByteRenderer(),
            budget=rl.Budget(max_turns=100),
            schedule=rl.Schedule(concurrency=concurrency),
        )

    async def _run(self) -> None:
        bus = Events()
        bus.subscribe(self.events.append)

        def take(part: Group | FailedGroup) -> None:
            assert isinstance(part, Group)
            self.parts.append(part)
            self.part_times.append(anyio.current_time())

        async with self._engine.opened(bus) as session:
            await session.publish(0)
            take(await session.group(0, None, self._size, completion=self._completion, on_part=take))

    def run(self) -> None:
        """Run the group to its end."""
        run_virtual(self._run)

    def member(self, index: int) -> Trajectory:
        """A member of any part."""
        [found] = [traj for part in self.parts for traj in part.members_G if traj.member == index]
        return found

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def test_wait_is_for_all_members() -> None:
    """Without a deadline the slowest member decides."""
    case = _Case([1, 1, 9])
    case.run()
    [group] = case.parts
    assert [traj.reward for traj in group.members_G] == [0.0, 1.0, 2.0]
    assert group.seconds == pytest.approx(9 * 0.9)
    assert (group.closed_by_deadline, group.final, group.last_member) == (False, True, 2)


def test_a_straggler_gets_the_tokens_it_may_have_and_is_then_truncated() -> None:
    """Quorum at 1 s, when the third member has one turn; it samples two more of 4 tokens, and wants another."""
    case = _Case([1, 1, 9], mode="deadline", min_members=2, max_straggler_tokens=8)
    case.run()
    [group] = case.parts
    late = group.members_G[2]
    assert (late.truncated, late.reward, late.generated_tokens) == (TruncationCause.GROUP_DEADLINE, -1.0, 4 + 8)
    assert group.seconds == pytest.approx(2.7)
    assert (group.closed_by_deadline, group.final) == (True, True)
    [passed] = case.of(DeadlinePassed)
    assert (passed.finished, passed.stragglers) == (2, 1)
    assert [event.closed_by_deadline for event in case.of(GroupFinished)] == [True]


def test_no_request_asks_for_more_than_a_straggler_may_have() -> None:
    """Six more tokens, four in the request under way: the next is cut to two, and the turn stays incomplete."""
    case = _Case([1, 1, 9], mode="deadline", min_members=2, max_straggler_tokens=6)
    case.run()
    assert case.member(2).generated_tokens == 4 + 6
    assert min(request.max_new_tokens for request in case.sampler.requests) == 2


def test_a_straggler_that_needs_no_more_than_it_may_have_is_complete() -> None:
    """The deadline is for those that want more."""
    case = _Case([1, 1, 3], mode="deadline", min_members=2, max_straggler_tokens=8)
    case.run()
    assert case.member(2).truncated is None
    assert case.member(2).reward == 2.0
    assert not case.parts[0].closed_by_deadline


def test_the_deadline_counts_tokens_and_not_seconds() -> None:
    """A member in a long tool call wants no tokens; it is waited for."""
    case = _Case([1, 1, 2], tool_s=500, mode="deadline", min_members=2, max_straggler_tokens=4)
    case.run()
    assert case.member(2).truncated is None
    assert case.parts[0].seconds == pytest.approx(500 + 2 * 0.9)


def test_one_straggler_past_the_limit_ends_the_others_in_their_tools_and_requests() -> None:
    """All unfinished members are treated together; a request under way is cancelled, and its tokens are not there."""

    def seconds(request: SegmentRequest) -> float:
        return 500.0 if request.trajectory_id.endswith("-003") else _first_two_last(request)

    case = _Case([1, 1, 9, 9], seconds=seconds, mode="deadline", min_members=2, max_straggler_tokens=8)
    case.run()
    stuck = case.member(3)
    assert (stuck.truncated, stuck.generated_tokens, stuck.reward) == (TruncationCause.GROUP_DEADLINE, 0, -1.0)
    assert case.parts[0].seconds == pytest.approx(2.7)
    assert case.sampler.in_flight == 0


def test_discarded_stragglers_are_not_in_the_group() -> None:
    """They get no reward and are reported with what they cost."""
    case = _Case([1, 1, 9], mode="deadline", min_members=2, max_straggler_tokens=4, on_stragglers="discard")
    case.run()
    [group] = case.parts
    assert [traj.member for traj in group.members_G] == [0, 1]
    assert (group.final, group.closed_by_deadline) == (True, True)
    [discarded] = case.of(MemberDiscarded)
    assert (discarded.member, discarded.generated_tokens) == (2, 8)


def test_carried_over_stragglers_follow_as_they_would_have_ended() -> None:
    """The finished members are ready at the deadline, the others when they are done; nobody is cut."""
    case = _Case([1, 1, 9, 5], mode="deadline", min_members=2, max_straggler_tokens=4, on_stragglers="carry_over")
    case.run()
    early, late = case.parts
    assert case.part_times == pytest.approx([1.8, 8.1])
    assert [traj.member for traj in early.members_G] == [0, 1]
    assert [traj.member for traj in late.members_G] == [2, 3]
    assert (early.final, late.final) == (False, True)
    assert [traj.generated_tokens for traj in late.members_G] == [36, 20]
    assert all(traj.truncated is None for traj in late.members_G)


@pytest.mark.parametrize("fate", ["truncate", "discard"])
def test_a_member_that_never_began_is_not_scored(fate: Any) -> None:
    """One slot: the fourth member still queues when the deadline passes. There is nothing of it to grade."""
    case = _Case(
        [1, 1, 9, 1], concurrency=1, mode="deadline", min_members=2, max_straggler_tokens=0, on_stragglers=fate
    )
    case.run()
    [group] = case.parts
    if fate == "discard":
        assert [traj.member for traj in group.members_G] == [0, 1]
        return
    waiting = group.members_G[3]
    assert (waiting.reward, waiting.dropped, waiting.spans) == (None, DropReason.STRAGGLER, [])


def test_a_reward_that_is_being_computed_is_not_cut() -> None:
    """Its conversation is complete; the group waits for it."""

    class Slow(_Turns):
        async def reward(self, traj: Trajectory, row: Row) -> float:
            await anyio.sleep(50.0 if traj.member == 2 else 0.0)
            return float(traj.member)

    case = _Case([1, 1, 1, 9], mode="deadline", min_members=2, max_straggler_tokens=4)
    case._engine = rl.RolloutEngine(
        scripted_policy(sampler=case.sampler), env=lambda: Slow([1, 1, 1, 9], 0.0), renderer=ByteRenderer()
    )
    case.run()
    assert case.member(2).reward == 2.0
    assert case.member(3).truncated is TruncationCause.GROUP_DEADLINE
    assert case.parts[0].seconds == pytest.approx(50.9)
