"""Which finished groups the trainer may take."""

from __future__ import annotations

from dataclasses import replace

import anyio
import numpy as np
import pytest

from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.batches import Batches
from asyncrl.scheduling.rules import BatchOrder, ForwardBackwardBatch
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.types import Group, Span, SpanKind, Trajectory


def _group(index: int, *, members: int = 2, tokens: int = 5) -> Group:
    trajectories = []
    for member in range(members):
        traj = Trajectory(id=f"{index}-{member}", group=index, member=member, row=None, seed=0)
        traj.append(Span(kind=SpanKind.PROMPT, tokens=np.zeros(tokens, dtype=np.int32)))
        trajectories.append(traj)
    return Group(index=index, row=None, members_G=trajectories, seconds=0.0)


class _Owners:
    """Admission, clock and batches wired as in a run."""

    def __init__(self, groups_per_step: int, max_staleness: int, order: BatchOrder = "completion") -> None:
        self.admission = Admission(slots=(1 + max_staleness) * groups_per_step, max_staleness=max_staleness)
        self.clock = PolicyClock()
        self.batches = Batches(admission=self.admission, clock=self.clock, groups_per_step=groups_per_step, order=order)

    def born(self, versions: list[int]) -> None:
        """Admit one group for each version and give birth to it under that version."""
        for version in versions:
            group = self.admission.admit_nowait()
            assert group is not None
            self.admission.birth(group, version)

    def ready(self, *groups: int) -> None:
        """These groups ended."""
        for group in groups:
            self.batches.put(_group(group))


def _indices(batch: list[Group] | None) -> list[int] | None:
    return None if batch is None else [group.index for group in batch]


def test_a_batch_is_taken_only_when_it_is_full() -> None:
    """Fewer ready groups than the batch needs are not enough."""
    owners = _Owners(groups_per_step=2, max_staleness=0)
    owners.born([0, 0])
    owners.ready(1)
    assert owners.batches.take_nowait(2) is None
    owners.ready(0)
    assert sorted(_indices(owners.batches.take_nowait(2)) or []) == [0, 1]


def test_the_earliest_due_groups_go_first() -> None:
    """A younger group that finished earlier waits for a later batch."""
    owners = _Owners(groups_per_step=1, max_staleness=2)
    owners.clock.committed = 1
    owners.born([1, 0])
    owners.ready(0, 1)
    assert _indices(owners.batches.take_nowait(1)) == [1]


def test_the_barrier_waits_for_a_group_that_would_be_too_old() -> None:
    """Worked example A: four a step, bound 1; five are ready, but a slow old one has no later step to go to."""
    owners = _Owners(groups_per_step=4, max_staleness=1)
    owners.clock.committed = 1
    owners.born([0, 0, 0, 0, 1, 1, 1, 1])
    owners.ready(0, 1, 2, 4, 5)
    assert owners.batches.take_nowait(4) is None
    owners.ready(3)
    assert _indices(owners.batches.take_nowait(4)) == [0, 1, 2, 3]


def test_groups_due_later_hold_the_barrier_too() -> None:
    """Two a step, bound 2: after a batch of the two youngest, four would be due in one step."""
    owners = _Owners(groups_per_step=2, max_staleness=2)
    owners.clock.committed = 1
    owners.born([0, 0, 0, 0, 1, 1])
    owners.ready(4, 5)
    assert owners.batches.take_nowait(2) is None
    owners.ready(0)
    assert owners.batches.take_nowait(2) is None
    owners.ready(1)
    assert _indices(owners.batches.take_nowait(2)) == [0, 1]


def test_admission_order_takes_the_oldest_or_nothing() -> None:
    """With ``batch_order="admission"`` a finished younger group never overtakes."""
    owners = _Owners(groups_per_step=1, max_staleness=1, order="admission")
    owners.born([0, 0])
    owners.ready(1)
    assert owners.batches.take_nowait(1) is None
    owners.ready(0)
    assert _indices(owners.batches.take_nowait(1)) == [0]


@pytest.mark.virtual_clock
async def test_the_wait_at_the_barrier_is_timed_and_names_the_group() -> None:
    """Seconds count from when enough groups were ready."""
    owners = _Owners(groups_per_step=1, max_staleness=1)
    owners.clock.committed = 1
    owners.born([0, 1])

    async def finish() -> None:
        await anyio.sleep(5)
        owners.ready(1)
        await anyio.sleep(7)
        owners.ready(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(finish)
        batch = await owners.batches.take(1)
    assert _indices(batch) == [0]
    assert [(wait.seconds, wait.group) for wait in owners.batches.take_waits()] == [(7.0, 0)]


@pytest.mark.virtual_clock
async def test_chunks_leave_when_a_threshold_is_reached() -> None:
    """Either threshold sends whole groups; the tail goes when it is all that remains."""
    owners = _Owners(groups_per_step=4, max_staleness=0)
    owners.born([0, 0, 0, 0])
    threshold = ForwardBackwardBatch(min_sequences=4, min_tokens=1000)
    owners.ready(2)
    with anyio.move_on_after(1) as scope:
        await owners.batches.take_chunk(4, threshold)
    assert scope.cancelled_caught
    owners.ready(0)
    assert _indices(await owners.batches.take_chunk(4, threshold)) == [0, 2]
    owners.ready(1)
    assert _indices(await owners.batches.take_chunk(1, threshold)) == [1]
    owners.ready(3)
    by_tokens = ForwardBackwardBatch(min_sequences=1000, min_tokens=10)
    assert _indices(await owners.batches.take_chunk(9, by_tokens)) == [3]


@pytest.mark.parametrize("size", [1, 2])
def test_a_part_of_before_the_birth_joins_one_of_after_it(size: int) -> None:
    """Stragglers are carried over: what ended before the group's first request waits for a batch, and is joined."""
    admission = Admission(slots=2, max_staleness=1, group_size=4)
    batches = Batches(admission=admission, clock=PolicyClock(), groups_per_step=1, bounded=False, split_size=2)
    index = admission.admit_nowait()
    assert index == 0
    whole = _group(index, members=4)
    batches.put(replace(whole, members_G=whole.members_G[:1], final=False))
    admission.birth(index, 0)
    batches.put(replace(whole, members_G=whole.members_G[1:]))
    taken = [batches.take_nowait(size) for _ in range(2 // size)]
    assert [traj.member for batch in taken for group in batch or () for traj in group.members_G] == [0, 1, 2, 3]
    assert batches.ready == admission.outstanding == 0
    assert admission.admit_nowait() == 1
    batches.put(_group(1, members=4))
    assert _indices(batches.take_nowait(2)) == [1]
