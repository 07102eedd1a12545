"""The ledger: each row has one fate, and what does not follow is refused at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.errors import StalenessError
from asyncrl.events import (
    BatchTaken,
    Event,
    GroupAdmitted,
    GroupConsumed,
    GroupDropped,
    GroupFinished,
    GroupRerolled,
    MemberFailed,
)
from asyncrl.scheduling.ledger import ENTERED, Ledger, LedgerTotals
from asyncrl.types import DropReason


def _admitted(group: int) -> Event:
    return GroupAdmitted(time=0.0, group=group)


def _finished(group: int) -> Event:
    return GroupFinished(time=0.0, group=group, seconds=1.0)


def _taken(*groups: int) -> Event:
    return BatchTaken(time=0.0, n=1, version=0, groups=groups)


def _consumed(group: int, *, trained: int = 2, final: bool = True, **dropped: int) -> Event:
    return GroupConsumed(time=0.0, n=1, group=group, trained=trained, dropped=dropped, final=final)


def _dropped(group: int) -> Event:
    return GroupDropped(time=0.0, group=group, reason=DropReason.FAILED)


def _failed(group: int) -> Event:
    return MemberFailed(time=0.0, group=group, member=1, attempt=1, error="no")


def _rerolled(group: int) -> Event:
    return GroupRerolled(time=0.0, group=group, error="no")


def _after(*events: Event) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger.observe(event)
    return ledger


def test_rows_are_consumed_dropped_or_open() -> None:
    """Three rows: one trained with a member missing, one dropped after two starts, one that the run's end finds."""
    ledger = _after(
        *(_admitted(group) for group in range(3)),
        _failed(1),
        _rerolled(1),
        _failed(1),
        _finished(0),
        _taken(0),
        _consumed(0, trained=1, failed=1),
        _dropped(1),
    )
    assert list(ledger.open) == [2]
    assert ledger.attempts(2) == {}
    assert ledger.metrics() == {
        "ledger/admitted_rows": 3.0,
        "ledger/consumed_rows": 1.0,
        "ledger/dropped_rows": 1.0,
        "ledger/open_rows": 1.0,
        "ledger/trained_members": 1.0,
        "ledger/dropped_members/failed": 1.0,
        "ledger/dropped_members/truncated": 0.0,
        "ledger/dropped_members/straggler": 0.0,
        "ledger/dropped_members/run_ended": 0.0,
        "ledger/failed_attempts": 2.0,
        "ledger/rerolled_groups": 1.0,
    }
    assert ledger.close() == 1
    assert ledger.totals.dropped == {"failed": 1, "run_ended": 1}
    assert ledger.metrics()["ledger/open_rows"] == 0.0


def test_attempts_are_counted_for_each_member_while_the_row_is_open() -> None:
    """Afterwards they are in the totals only, so that memory does not grow with the run."""
    ledger = _after(_admitted(0), _failed(0), _failed(0))
    assert ledger.attempts(0) == {1: 2}
    ledger.observe(_dropped(0))
    with pytest.raises(StalenessError, match="group 0 is looked up, but has its fate already"):
        ledger.attempts(0)


def test_parts_of_a_group_are_consumed_one_by_one() -> None:
    """Carried-over stragglers: the row's fate is that of its last member."""
    ledger = _after(_admitted(0), _taken(0), _consumed(0, final=False))
    assert list(ledger.open) == [0]
    for event in (_taken(0), _finished(0), _consumed(0)):
        ledger.observe(event)
    assert list(ledger.open) == []
    assert (ledger.totals.consumed, ledger.totals.trained_members) == (1, 4)


@pytest.mark.parametrize(
    ("before", "event", "message"),
    [
        ([], _admitted(1), "group 1 is admitted after 0 groups"),
        ([_admitted(0)], _admitted(0), "group 0 is admitted after 1 groups"),
        ([], _taken(0), "group 0 is taken, but was never admitted"),
        ([_admitted(0)], _consumed(0), "no batch has it"),
        ([_admitted(0), _taken(0)], _consumed(0), "members of it are under way"),
        ([_admitted(0), _finished(0), _taken(0), _consumed(0)], _taken(0), "taken, but has its fate already"),
        ([_admitted(0), _finished(0), _taken(0), _consumed(0)], _consumed(0), "consumed, but has its fate already"),
        ([_admitted(0), _finished(0), _taken(0), _taken(0)], _consumed(0), "members of it are under way"),
        ([_admitted(0), _finished(0)], _finished(0), "finished twice"),
        ([_admitted(0), _finished(0)], _rerolled(0), "rolled out anew, but members of it are in a batch"),
        ([_admitted(0), _taken(0)], _dropped(0), "dropped, but members of it are in a batch"),
        ([_admitted(0), _dropped(0)], _dropped(0), "dropped, but has its fate already"),
        ([_admitted(0), _dropped(0)], _failed(0), "running, but has its fate already"),
    ],
)
def test_what_does_not_follow_is_a_bug(before: list[Event], event: Event, message: str) -> None:
    """At the event itself, with the group."""
    ledger = _after(*before)
    with pytest.raises(StalenessError, match=message):
        ledger.observe(event)


def test_a_resumed_ledger_goes_on_with_its_rows() -> None:
    """Totals and open groups are all of its state; they have to balance."""
    ledger = Ledger(totals=LedgerTotals(admitted=5, consumed=3), open={2: False, 4: False})
    for event in (_finished(2), _taken(2), _consumed(2), _dropped(4), _admitted(5)):
        ledger.observe(event)
    assert list(ledger.open) == [5]
    with pytest.raises(StalenessError, match="of 5 admitted rows 3 are consumed, 0 dropped and 1 open"):
        Ledger(totals=LedgerTotals(admitted=5, consumed=3), open={2: False})


@pytest.mark.parametrize("seed", range(50))
def test_no_order_of_legal_events_is_refused_and_no_row_is_lost(seed: int) -> None:
    """Random lives of a hundred rows; the ledger agrees with a list of fates."""
    draw = random.Random(seed)
    ledger, fates = Ledger(), dict.fromkeys(range(100), "")
    todo: dict[int, list[Callable[[int], Any]]] = {}
    admitted = 0
    while admitted < 100 or todo:
        if admitted < 100 and (not todo or draw.random() < 0.3):
            ledger.observe(_admitted(admitted))
            fates[admitted] = draw.choice(["consumed", "dropped"])
            trouble = draw.choices([_failed, _rerolled], k=draw.choice([0, 0, 1, 3]))
            last = [_finished, _taken, _consumed] if fates[admitted] == "consumed" else [_dropped]
            todo[admitted] = [*trouble, *last]
            admitted += 1
            continue
        group = draw.choice(sorted(todo))
        ledger.observe(todo[group].pop(0)(group))
        if not todo[group]:
            del todo[group]
        assert set(ledger.open) == todo.keys()
    assert ledger.totals.consumed == sum(fate == "consumed" for fate in fates.values())
    assert ledger.totals.dropped["failed"] == sum(fate == "dropped" for fate in fates.values())


def test_the_events_to_subscribe_to_are_those_that_are_entered() -> None:
    """Any other one changes nothing."""
    ledger = Ledger()
    assert GroupConsumed in ENTERED
    ledger.observe(Event(time=0.0))
    assert ledger.metrics()["ledger/admitted_rows"] == 0.0
