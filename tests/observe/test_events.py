"""The stream of events and who observes it."""

from __future__ import annotations

from asyncrl.events import Event, Events, GroupAdmitted, Notice


def test_a_kind_of_event_is_wanted_as_long_as_somebody_observes_it() -> None:
    """By name or with all others; the answer follows each subscription and its end."""
    events, seen = Events(), list[Event]()
    assert not events.wants(Notice)
    end_one = events.subscribe(seen.append, kinds=(Notice,))
    assert events.wants(Notice)
    assert not events.wants(GroupAdmitted)
    end_all = events.subscribe(seen.append)
    assert events.wants(GroupAdmitted)
    events.emit(GroupAdmitted(time=1.0, group=0))
    end_one()
    end_all()
    assert not events.wants(Notice)
    events.emit(Notice(time=2.0, name="unseen"))
    assert seen == [GroupAdmitted(time=1.0, group=0)]
