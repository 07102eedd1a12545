"""An observer that keeps accounts of its own and compares them with those of the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from asyncrl.events import (
    BarrierOpened,
    BatchTaken,
    Event,
    GroupAdmitted,
    GroupBorn,
    GroupConsumed,
    GroupFinished,
    StepFinished,
    VersionCommitted,
    VersionPublished,
)
from asyncrl.scheduling.admission import Admission

__all__ = ["ScheduleAudit", "watched"]

T = TypeVar("T")


class ScheduleAudit:
    """Balances at every event. For runs whose groups stay whole."""

    def __init__(self, slots: int, admissions: Sequence[Admission]) -> None:
        self._slots = slots
        self._admissions = admissions
        self.admitted: set[int] = set()
        self.born: dict[int, GroupBorn] = {}
        self.finished: set[int] = set()
        self.consumed: set[int] = set()
        self._batch = 0
        # Groups that the trainer took for the step under way.
        self._unpublished: dict[int, int] = {}

    @property
    def outstanding(self) -> int:
        """Groups admitted and not taken."""
        return len(self.admitted) - len(self.consumed)

    @property
    def held(self) -> int:
        """Slots in use: outstanding groups, and batches whose version is not published."""
        return self.outstanding + self._batch + sum(self._unpublished.values())

    def observe(self, event: Event) -> None:
        """Enter ``event``, which must follow from what was entered before, then balance."""
        match event:
            case GroupAdmitted(group=group):
                assert group not in self.admitted
                self.admitted.add(group)
            case GroupBorn(group=group):
                assert group in self.admitted - self.born.keys()
                self.born[group] = event
            case GroupFinished(group=group):
                assert group in self.born.keys() - self.finished
                self.finished.add(group)
            case BatchTaken(groups=groups):
                assert self.finished - self.consumed >= set(groups)
                self.consumed.update(groups)
                self._batch += len(groups)
            case VersionCommitted(version=version):
                self._unpublished[version] = self._batch
                self._batch = 0
            case GroupConsumed() | StepFinished():
                self._batch = 0  # without a gradient there is no version to wait for
            case VersionPublished(version=version):
                for made in [made for made in self._unpublished if made <= version]:
                    del self._unpublished[made]
            case BarrierOpened():
                return  # the batch has left Admission, and is reported next
        self.balance()

    def balance(self) -> None:
        """Admitted groups are consumed or outstanding, within the slots, and ``Admission`` says the same."""
        held = self.held
        assert held <= self._slots
        for admission in self._admissions:
            assert admission.admitted == len(self.admitted)
            assert admission.outstanding == self.outstanding
            assert admission.slots_in_use == held


@contextmanager
def watched(kind: type[T]) -> Iterator[list[T]]:
    """Collect the instances of ``kind`` that are made meanwhile."""
    made: list[T] = []
    original = kind.__init__

    def remember(self: T, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__init__", remember)
        yield made
