"""What does the scheduler itself cost for each event, and does that grow with what is outstanding?

The real ``Admission``, ``Batches`` and ``PolicyClock``, driven as the trainer drives them, without an event loop. Every
step admits and dispatches P groups, ends P groups, takes a batch, commits and publishes: four events for each group and
two for each step.

*The barrier opens*: the groups that are due end, in any order, and the barrier is asked once. *It refuses*: one group
of those due ends last. Until then half of all groups become ready, and each one that ends makes the trainer ask the
barrier again, in vain.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterable, Iterator

from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.batches import Batches
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.types import Group, Trajectory
from benchmarks.answer import Answer

__all__ = ["answers"]

_GROUP_SIZE = 16
_GOAL_US = 10.0
_EVENTS = 40_000
# Of each measurement, at the least.
_REPEATS = 5
_CASES = ((24, 2), (384, 2), (3_072, 2), (100_000, 2), (3_072, 8))
# Outstanding groups and S; the first is what the others are compared with.


def answers() -> Iterator[Answer]:
    """Microseconds per event for every size, with a barrier that opens and with one that refuses."""
    for refuses, barrier in (
        (False, "the barrier opens"),
        (True, "half of them ready, and a closed barrier is asked each time one ends"),
    ):
        anchor = 0.0
        for outstanding, max_staleness in _CASES:
            figure = _us_per_event(outstanding // (1 + max_staleness), max_staleness, refuses)
            anchor = anchor or figure
            yield Answer(
                question=f"scheduler CPU per event, {outstanding} outstanding groups, S={max_staleness}, {barrier}",
                figure=figure,
                unit="us",
                anchor=f"the same with {_CASES[0][0]} outstanding groups, S={_CASES[0][1]}",
                anchor_figure=anchor,
                ratio=figure / anchor,
                goal=f"at most {_GOAL_US:g} us",
                meets_goal=figure <= _GOAL_US,
            )


def _us_per_event(groups_per_step: int, max_staleness: int, refuses: bool) -> float:
    """Median of several measurements of whole steps, after a warm-up."""
    trainer = _Trainer(groups_per_step, max_staleness, refuses)
    events = 4 * groups_per_step + 2
    steps = -(-_EVENTS // events)
    figures = []
    for _ in range(1 + _REPEATS):
        ending = [trainer.ending(trainer.version + step) for step in range(steps)]
        gc.collect()
        gc.disable()
        started = time.process_time()
        for groups in ending:
            trainer.step(groups)
        figures.append((time.process_time() - started) / (steps * events) * 1e6)
        gc.enable()
    return statistics.median(figures[1:])


class _Trainer:
    """A trainer that only counts. While version v is committed, cohort v is due: groups vP .. vP + P - 1."""

    def __init__(self, groups_per_step: int, max_staleness: int, refuses: bool) -> None:
        self._size = groups_per_step
        self._half = (1 + max_staleness) * groups_per_step // 2
        self._refuses = refuses
        self._random = random.Random(0)
        self._clock = PolicyClock()
        slots = (1 + max_staleness) * groups_per_step
        self._admission = Admission(slots=slots, max_staleness=max_staleness, group_size=_GROUP_SIZE)
        self._batches = Batches(admission=self._admission, clock=self._clock, groups_per_step=groups_per_step)
        self._members = tuple(Trajectory(id="", group=0, member=i, row=0, seed=0) for i in range(_GROUP_SIZE))
        self._admit()
        # The first 1 + S cohorts are born together: only when these steps are done is each cohort due alone.
        for version in range(max_staleness):
            self.step(self._groups(range(version * groups_per_step, (version + 1) * groups_per_step)))
        if refuses:
            for group in self._groups(self._ready(max_staleness)):
                self._batches.put(group)

    @property
    def version(self) -> int:
        """The committed version."""
        return self._clock.committed

    def ending(self, version: int) -> list[Group]:
        """The groups that end while ``version`` is committed; the last one opens the barrier."""
        first = version * self._size
        if not self._refuses:
            return self._groups(range(first, first + self._size))
        ready = set(self._ready(version))
        return self._groups(index for index in self._ready(version + 1) if index not in ready) + self._groups([first])

    def step(self, ending: list[Group]) -> None:
        """These groups end; the batch is trained and published, and the next cohort is admitted and dispatched."""
        batch = None
        for group in ending:
            self._batches.put(group)
            if self._batches.ready >= self._size:
                batch = self._batches.take_nowait(self._size)
        if batch is None:
            raise AssertionError(f"the barrier is closed at version {self.version} although all groups due have ended")
        version = self._clock.commit()
        self._admission.end_batch(version)
        self._clock.publish(version)
        self._admission.published(version)
        self._admit()

    def _admit(self) -> None:
        while (group := self._admission.admit_nowait()) is not None:
            self._admission.birth(group, self._clock.published)

    def _ready(self, version: int) -> list[int]:
        """What is ready when ``version`` is committed: the older half, but for the first group of each cohort."""
        first = version * self._size
        return [index for index in range(first, first + self._half) if index % self._size]

    def _groups(self, indices: Iterable[int]) -> list[Group]:
        groups = [Group(index=index, row=0, members_G=self._members, seconds=0.0) for index in indices]
        self._random.shuffle(groups)
        return groups
