"""Slow trajectories: the trainer waits for them at the barrier, and everything else goes on. All times are exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

import asyncrl as rl
from asyncrl.events import BarrierOpened, Event, GroupFinished, SegmentSampled, ToolCalled, VersionCommitted
from asyncrl.sampling.base import SegmentRequest
from tests.scheduling.runs import NEWEST, Run, Shape

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")


def _by_group(seconds: Mapping[int, float], *, member: int = 0) -> Callable[[SegmentRequest], float]:
    """A second for each request, but for that member of these groups."""

    def duration(request: SegmentRequest) -> float:
        group, number = (int(part) for part in request.trajectory_id.split("-"))
        return seconds.get(group, 1.0) if number == member else 1.0

    return duration


def _commits(run: Run) -> list[float]:
    return [event.time for event in run.of(VersionCommitted)]


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("kv_cache", [None, NEWEST], ids=["trajectory", "segment"])
def test_a_trajectory_a_hundred_times_slower_is_waited_for_and_trained(
    max_staleness: int, kv_cache: rl.KVCache | None
) -> None:
    """No commit passes its due step. Meanwhile every slot of 4.3 is used: all free ones are sampled to their end.

    Two groups a step, two turns of a second and a tool of half a second each: a trajectory takes 3 s, the slow one 300.
    """
    run = Run(
        Shape(
            max_staleness=max_staleness,
            groups_per_step=2,
            steps=2 * max_staleness + 4,
            kv_cache=kv_cache,
            turns=lambda traj: 2,
            sampling_s=_by_group({0: 149.5}, member=1),
            tool_s=lambda: 0.5,
        )
    )
    run.play()
    # Until the barrier, S batches without the slow group go as soon as their samples are there.
    commits = _commits(run)
    assert commits[: max_staleness + 1] == [3.0] * max_staleness + [300.0]
    [wait] = [event.wait for event in run.of(BarrierOpened)]
    assert (wait.group, wait.member, wait.seconds) == (0, 1, 294.0)  # from 6 s on there are two other groups
    [slow] = [trained for trained in run.learner.trained if (trained.group, trained.member) == (0, 1)]
    assert (slow.version, max(slow.ages)) == (max_staleness, max_staleness)

    def during(kind: type[Event]) -> list[Event]:
        return [event for event in run.of(kind) if 3.0 < event.time < 300.0]

    # The published batches' slots, two groups of two members each, with two turns of four tokens and a tool call after
    # each; and the slow one's two turns, with the tool call between them.
    groups = 2 * max_staleness
    sampled = [event for event in during(SegmentSampled) if isinstance(event, SegmentSampled)]
    assert sum(event.tokens for event in sampled) == groups * 2 * 2 * 4 + 2 * 4
    assert len(during(ToolCalled)) == groups * 2 * 2 + 1
    assert len(during(GroupFinished)) == groups
    assert run.shape.slots == groups + 2


def test_the_trainer_stops_before_the_limit_where_several_groups_are_due_in_one_step() -> None:
    """Two groups a step, bound 2; groups 2..5 are due by version 2 and slow, two younger ones are ready at 2 s.

    At version 1 nobody is due. But a batch of the two younger ones would leave four groups for the one step at version
    2, so it waits: at 10 s for the first of the four, which still leaves three, and at 20 s for the second.
    """
    run = Run(
        Shape(max_staleness=2, groups_per_step=2, steps=6, sampling_s=_by_group({2: 10.0, 3: 20.0, 4: 30.0, 5: 40.0}))
    )
    audit = run.play()
    assert {group: born.due for group, born in audit.born.items() if group < 8} == dict.fromkeys(range(6), 2) | {
        6: 3,
        7: 3,
    }
    assert {event.group: event.time for event in run.of(GroupFinished) if event.group < 8} == {
        0: 1.0,
        1: 1.0,
        2: 10.0,
        3: 20.0,
        4: 30.0,
        5: 40.0,
        6: 2.0,
        7: 2.0,
    }
    assert _commits(run)[:4] == [1.0, 20.0, 40.0, 40.0]
    assert [(event.wait.group, event.wait.seconds, event.time) for event in run.of(BarrierOpened)] == [
        (3, 18.0, 20.0),
        (5, 20.0, 40.0),
    ]
    assert max(age for trained in run.learner.trained for age in trained.ages) == 2


def test_the_trainer_stops_two_steps_before_the_limit() -> None:
    """One group a step, bound 3; groups 1, 2 and 3 are due by version 3, which is two steps after version 1.

    At version 1 the younger group 4 is ready at 2 s. Nobody is due now or in the next step, but three groups do not
    fit into the two steps at versions 2 and 3: the trainer waits for group 1 at 10 s.
    """
    run = Run(Shape(max_staleness=3, groups_per_step=1, steps=7, sampling_s=_by_group({1: 10.0, 2: 20.0, 3: 25.0})))
    run.play()
    assert _commits(run)[:4] == [1.0, 10.0, 20.0, 25.0]
    waits = [(event.wait.group, event.wait.seconds) for event in run.of(BarrierOpened)]
    assert waits == [(1, 8.0), (2, 10.0), (3, 5.0)]
