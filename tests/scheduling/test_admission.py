"""Reservations."""

from __future__ import annotations

import anyio
import pytest

from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.rules import Schedule


@pytest.mark.parametrize(
    ("admit_ahead", "oversample_factor", "slots"),
    [(2, 1.0, 24), (2, 1.5, 24), (1, 1.0, 16), (1, 1.5, 24), (0, 1.0, 8), (0, 1.5, 12)],
)
def test_slots_follow_the_formula(admit_ahead: int, oversample_factor: float, slots: int) -> None:
    """min((1 + S) P, ceil((1 + ahead) P f)) with 8 groups a step and a bound of 2."""
    schedule = Schedule(admit_ahead=admit_ahead, oversample_factor=oversample_factor)
    assert schedule.slots(groups_per_step=8, max_staleness=2) == slots


def test_a_bound_of_zero_admits_the_current_batch_only() -> None:
    """admit_ahead never exceeds the bound."""
    assert Schedule(admit_ahead=2).slots(groups_per_step=8, max_staleness=0) == 8


def test_a_group_is_born_at_its_first_dispatch() -> None:
    """Waiting does not age a group; later dispatches do not change its due step."""
    admission = Admission(slots=2, max_staleness=2)
    group = admission.admit_nowait()
    assert group == 0
    assert admission.due(group) is None
    assert not admission.due_counts
    assert admission.birth(group, 5) == 7
    assert admission.birth(group, 6) is None
    assert admission.due(group) == 7
    assert dict(admission.due_counts) == {7: 1}


def test_slots_come_back_at_publication() -> None:
    """A trained batch keeps its slots until its version is live."""
    admission = Admission(slots=2, max_staleness=0)
    assert [admission.admit_nowait(), admission.admit_nowait(), admission.admit_nowait()] == [0, 1, None]
    for group in (0, 1):
        admission.birth(group, 0)
    admission.take([0, 1])
    assert admission.admit_nowait() is None
    admission.end_batch(1)
    assert admission.admit_nowait() is None
    admission.published(1)
    assert admission.admit_nowait() == 2


def test_slots_of_a_batch_without_gradient_come_back_at_once() -> None:
    """It made no version, so there is no publication to wait for."""
    admission = Admission(slots=1, max_staleness=0)
    admission.admit_nowait()
    admission.birth(0, 0)
    admission.take([0])
    admission.end_batch(None)
    assert admission.slots_in_use == 0
    assert admission.admit_nowait() == 1


@pytest.mark.virtual_clock
async def test_admission_waits_for_a_slot_and_can_be_cancelled() -> None:
    """The waiter is woken by the release; a cancelled one takes nothing."""
    admission = Admission(slots=1, max_staleness=0)
    assert await admission.admit() == 0
    with anyio.move_on_after(1):
        await admission.admit()
    assert admission.slots_in_use == 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(admission.admit)
        await anyio.sleep(1)
        admission.drop(0)
    assert admission.admitted == 2
    assert admission.outstanding == 1
