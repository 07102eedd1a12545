"""The ledger: what became of each admitted row, exactly once.

A row is entered when its group is admitted, and leaves with one of two fates: *consumed* by a step (its members
trained, or left out for a named reason each), or *dropped* as a whole for a named reason. The ledger reads the run's
events and nothing else, so that it checks the owners of the schedule and does not share their mistakes. Whatever does
not follow from what was entered before (a group consumed twice, taken but never admitted, dropped after it was taken)
is a bug of asyncrl and raises ``StalenessError`` at the event itself. Constant work for each event.

After every event: ``admitted == consumed + dropped + open``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
from asyncrl.types import DropReason

__all__ = ["ENTERED", "Ledger", "LedgerTotals"]


@dataclass(slots=True, kw_only=True)
class LedgerTotals:
    """Sums since the run began."""

    admitted: int = 0
    """Rows; the group of the next one has this index."""
    consumed: int = 0
    """Rows whose last member was in a batch."""
    dropped: Counter[str] = field(default_factory=Counter)
    """``DropReason`` -> rows."""
    trained_members: int = 0
    dropped_members: Counter[str] = field(default_factory=Counter)
    """``DropReason`` -> members of consumed rows."""
    failed_attempts: int = 0
    rerolled: int = 0
    """Fresh starts of groups."""

    def consume(self, event: GroupConsumed) -> None:
        """Add what became of a group, or of a part of one."""
        self.consumed += event.final
        self.trained_members += event.trained
        self.dropped_members.update(event.dropped)


@dataclass(slots=True, kw_only=True)
class _Entry:
    """An open row."""

    finished: bool = False
    """All members ended."""
    taken: int = 0
    """Batches under way that have it, or a part of it."""
    parts: int = 0
    """Batches that are over and had a part of it."""
    attempts: Counter[int] = field(default_factory=Counter)
    """Member -> failed attempts."""


class Ledger:
    """Owns the fate of every row of a run. Subscribe ``observe`` to ``ENTERED``.

    A resumed run passes the ``totals`` and the groups that were ``open``, True if all of their members had ended.
    """

    def __init__(self, *, totals: LedgerTotals | None = None, open: Mapping[int, bool] | None = None) -> None:
        self.totals = totals or LedgerTotals()
        self._open = {group: _Entry(finished=finished) for group, finished in (open or {}).items()}
        self._balance()

    @property
    def open(self) -> Iterable[int]:
        """Groups whose rows have no fate yet, in the order of admission."""
        return self._open.keys()

    def attempts(self, group: int) -> Mapping[int, int]:
        """Member -> failed attempts, of an open group."""
        return self._entry(group, "looked up").attempts

    def observe(self, event: Event) -> None:
        """Enter ``event``. Raises ``StalenessError`` if it cannot be."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
            self._balance()

    def close(self) -> int:
        """The run has ended: what is open is dropped for that reason. Returns how many rows that are."""
        ended = len(self._open)
        self._open.clear()
        self.totals.dropped[DropReason.RUN_ENDED] += ended
        self._balance()
        return ended

    def metrics(self) -> Mapping[str, float]:
        """Totals, and what is open now. The keys are always the same."""
        totals = self.totals
        return {
            "ledger/admitted_rows": float(totals.admitted),
            "ledger/consumed_rows": float(totals.consumed),
            "ledger/dropped_rows": float(totals.dropped.total()),
            "ledger/open_rows": float(len(self._open)),
            "ledger/trained_members": float(totals.trained_members),
            **{f"ledger/dropped_members/{reason}": float(totals.dropped_members[reason]) for reason in DropReason},
            "ledger/failed_attempts": float(totals.failed_attempts),
            "ledger/rerolled_groups": float(totals.rerolled),
        }

    def _balance(self) -> None:
        totals = self.totals
        if totals.admitted != totals.consumed + totals.dropped.total() + len(self._open):
            raise StalenessError(
                f"of {totals.admitted} admitted rows {totals.consumed} are consumed, {totals.dropped.total()} dropped "
                f"and {len(self._open)} open"
            )

    def _entry(self, group: int, verb: str) -> _Entry:
        entry = self._open.get(group)
        if entry is None:
            state = "was never admitted" if group >= self.totals.admitted else "has its fate already"
            raise StalenessError(f"group {group} is {verb}, but {state}")
        return entry

    def _admit(self, event: GroupAdmitted) -> None:
        if event.group != self.totals.admitted:
            raise StalenessError(f"group {event.group} is admitted after {self.totals.admitted} groups")
        self.totals.admitted += 1
        self._open[event.group] = _Entry()

    def _fail(self, event: MemberFailed) -> None:
        self._entry(event.group, "running").attempts[event.member] += 1
        self.totals.failed_attempts += 1

    def _reroll(self, event: GroupRerolled) -> None:
        entry = self._entry(event.group, "rolled out anew")
        if entry.finished or entry.taken or entry.parts:
            raise StalenessError(f"group {event.group} is rolled out anew, but members of it are in a batch")
        self.totals.rerolled += 1

    def _finish(self, event: GroupFinished) -> None:
        entry = self._entry(event.group, "finished")
        if entry.finished:
            raise StalenessError(f"group {event.group} is finished twice")
        entry.finished = True

    def _take(self, event: BatchTaken) -> None:
        for group in event.groups:
            self._entry(group, "taken").taken += 1

    def _consume(self, event: GroupConsumed) -> None:
        entry = self._entry(event.group, "consumed")
        if not entry.taken:
            raise StalenessError(f"group {event.group} is consumed, but no batch has it")
        entry.taken -= 1
        entry.parts += 1
        if event.final:
            if not entry.finished or entry.taken:
                raise StalenessError(f"group {event.group} is consumed, but members of it are under way")
            del self._open[event.group]
        self.totals.consume(event)

    def _drop(self, event: GroupDropped) -> None:
        entry = self._entry(event.group, "dropped")
        if entry.taken or entry.parts:
            raise StalenessError(f"group {event.group} is dropped, but members of it are in a batch")
        del self._open[event.group]
        self.totals.dropped[event.reason] += 1


_HANDLERS: Mapping[type[Event], Callable[[Ledger, Any], None]] = {
    GroupAdmitted: Ledger._admit,
    GroupRerolled: Ledger._reroll,
    GroupFinished: Ledger._finish,
    BatchTaken: Ledger._take,
    GroupConsumed: Ledger._consume,
    GroupDropped: Ledger._drop,
    MemberFailed: Ledger._fail,
}
ENTERED = tuple(_HANDLERS)
"""The events to subscribe to."""
