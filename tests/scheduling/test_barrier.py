"""The barrier against brute force, in every state that random runs of its owners reach.

P groups a batch, U updates a batch, S the bound, v the committed version, as in ``staleness.py``.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.batches import Batches
from asyncrl.scheduling.rules import BatchOrder, Schedule
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.types import Group
from tests.scheduling.bruteforce import openings, trainable

_SCHEDULES = st.builds(Schedule, admit_ahead=st.integers(0, 3), oversample_factor=st.sampled_from([1.0, 1.3, 2.0]))


class _Owners:
    """Admission, clock and batches, moved as a run would move them, beside accounts of our own."""

    def __init__(
        self, groups_per_step: int, max_staleness: int, updates: int, order: BatchOrder, schedule: Schedule
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.updates = updates
        self.order = order
        self.slots = schedule.slots(groups_per_step=groups_per_step, max_staleness=max_staleness, updates=updates)
        self.admission = Admission(slots=self.slots, max_staleness=max_staleness, updates=updates)
        self.clock = PolicyClock()
        self.batches = Batches(
            admission=self.admission,
            clock=self.clock,
            groups_per_step=groups_per_step,
            updates=updates,
            order=order,
        )
        self.unborn: list[int] = []
        self.running: dict[int, int] = {}
        self.ready: dict[int, int | None] = {}
        # Group -> due step; None of one that ended without a birth.
        self.training = False
        self.unpublished: list[int] = []

    @property
    def outstanding(self) -> int:
        """Groups admitted and not taken."""
        return len(self.unborn) + len(self.running) + len(self.ready)

    @property
    def held(self) -> int:
        """Slots in use: outstanding groups, the batch under way, batches whose version is not published."""
        return self.outstanding + (self.training + len(self.unpublished)) * self.groups_per_step

    @property
    def _quick(self) -> list[int]:
        """Running groups that are not among the slow third."""
        return [group for group in self.running if group % 3]

    def moves(self) -> list[str]:
        """What can happen now."""
        possible = {
            "birth": self.unborn,
            "end": self._quick,
            "end slow": self.running.keys() - self._quick,
            "end unborn": self.unborn,
            "take": len(self.ready) >= self.groups_per_step and not self.training,
            "commit": self.training,
            "settle without a version": self.training,
            "publish": self.unpublished,
            "renew": self.running,
            "drop": [*self.unborn, *self.running],
        }
        return [name for name, able in possible.items() if able]

    def move(self, name: str, draw: random.Random) -> None:
        """Let one of them happen; admission follows at once, as in a run."""
        match name:
            case "birth":
                self.birth(draw.choice(self.unborn))
            case "end":
                self.end(draw.choice(self._quick))
            case "end slow":
                self.end(draw.choice(sorted(self.running.keys() - self._quick)))
            case "end unborn":
                self.end_unborn(draw.choice(self.unborn))
            case "take":
                self.take()
            case "commit" | "settle without a version":
                self.settle(draw.choice([1, self.updates, self.updates]) if name == "commit" else 0)
            case "publish":
                self.publish()
            case "renew":
                self.renew(draw.choice(sorted(self.running)))
            case "drop":
                self.drop(draw.choice([*self.unborn, *self.running]))
        self.admit()

    def admit(self) -> None:
        """As many as there are slots."""
        while (group := self.admission.admit_nowait()) is not None:
            self.unborn.append(group)
        assert self.held == self.slots

    def birth(self, group: int) -> None:
        """Under the published version, however far that lags."""
        self.unborn.remove(group)
        due = self.admission.birth(group, self.clock.published)
        assert due == self.clock.published + self.max_staleness - (self.updates - 1)
        self.running[group] = due

    def end(self, group: int) -> None:
        """All members have ended."""
        self.ready[group] = self.running.pop(group)
        self.batches.put(Group(index=group, row=None, members_G=[], seconds=0.0))

    def end_unborn(self, group: int) -> None:
        """All members have ended before any of them sampled."""
        self.unborn.remove(group)
        self.ready[group] = None
        self.batches.put(Group(index=group, row=None, members_G=[], seconds=0.0))

    def take(self) -> None:
        """The trainer looks: the barrier is open exactly if some batch may go, and what goes is such a batch."""
        allowed = self.allowed()
        batch = self.batches.take_nowait(self.groups_per_step)
        assert (batch is not None) == bool(allowed)
        if batch is None:
            return
        taken = [self.ready.pop(group.index) for group in batch]
        dues = [due for due in taken if due is not None]
        assert tuple(sorted(dues)) in allowed
        if self.order == "completion":
            assert len(dues) == min(map(len, allowed)), "what has no age goes as soon as it may"
        for due in dues:
            sampled = due - self.max_staleness + (self.updates - 1)
            for update in range(self.updates):
                assert 0 <= self.clock.committed + update - sampled <= self.max_staleness
        self.training = True

    def settle(self, versions: int) -> None:
        """The batch makes so many versions: one for each update, fewer if some have no gradient, or none."""
        self.training = False
        version = self.clock.commit(versions) if versions else None
        self.admission.end_batch(version)
        if version is not None:
            self.unpublished.append(version)

    def publish(self) -> None:
        """The oldest version that waits for it."""
        version = self.unpublished.pop(0)
        self.clock.publish(version)
        self.admission.published(version)

    def renew(self, group: int) -> None:
        """It starts afresh, and is born when it samples again."""
        del self.running[group]
        self.unborn.append(group)
        self.batches.renew(group)
        assert self.admission.due(group) is None

    def drop(self, group: int) -> None:
        """It failed; its slot is free at once."""
        if self.running.pop(group, None) is None:
            self.unborn.remove(group)
        self.batches.drop(group)

    def allowed(self) -> set[tuple[int, ...]]:
        """The due steps of each batch that may go. In admission order there is one candidate: the P oldest."""
        ready, rest = self.ready, dict(self.running)
        if self.order == "admission":
            oldest = sorted([*self.unborn, *self.running, *self.ready])[: self.groups_per_step]
            ready = {group: self.ready[group] for group in oldest if group in self.ready}
            rest |= {group: due for group, due in self.ready.items() if group not in ready and due is not None}
        return openings(
            ready.values(),
            list(rest.values()),
            version=self.clock.committed,
            groups_per_step=self.groups_per_step,
            updates=self.updates,
        )

    def check(self) -> None:
        """What must hold after every move."""
        dues = [*self.running.values(), *(due for due in self.ready.values() if due is not None)]
        assert self.admission.outstanding == self.outstanding
        assert self.admission.slots_in_use == self.held <= self.slots
        assert Counter(self.admission.due_counts) == Counter(dues)
        assert self.batches.ready == len(self.ready)
        upcoming = self.clock.committed + self.training * self.updates
        assert trainable(dues, version=upcoming, groups_per_step=self.groups_per_step, updates=self.updates)
        if self.training:
            return
        allowed = self.allowed()
        if self.order == "completion":
            assert bool(allowed) == self._open_by_counts(dues)
        if not allowed:
            assert self.batches.take_nowait(self.groups_per_step) is None

    def _open_by_counts(self, dues: list[int]) -> bool:
        """The form in O(S): with N_j groups due by v + j a batch must hold max(0, N_j - (j // U) P) of them."""
        for j in range(self.max_staleness + 1):
            last = self.clock.committed + j
            need = max(0, sum(due <= last for due in dues) - j // self.updates * self.groups_per_step)
            ready = sum(due is not None and due <= last for due in self.ready.values())
            if min(self.groups_per_step, ready) < need:
                return False
        return len(self.ready) >= self.groups_per_step

    def end_all(self) -> None:
        """Every running group ends, the youngest first; then the barrier must open, if only it has a batch."""
        for group in sorted(self.running, reverse=True):
            self.end(group)
        reachable = set(self.ready)
        if self.order == "admission":
            reachable &= set(sorted([*self.unborn, *self.ready])[: self.groups_per_step])
        assert bool(self.allowed()) == (len(reachable) >= self.groups_per_step)


@pytest.mark.parametrize("order", ["completion", "admission"])
@pytest.mark.parametrize("groups_per_step", [1, 2, 3, 4])
@pytest.mark.parametrize("batches_ahead", [0, 1, 2, 3])
@settings(max_examples=20, deadline=None)
@given(_SCHEDULES, st.sampled_from([(1, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 2), (4, 1)]), st.integers(0, 2**32))
def test_the_barrier_opens_exactly_when_some_batch_may_go(
    batches_ahead: int,
    groups_per_step: int,
    order: BatchOrder,
    schedule: Schedule,
    updates_and_rest: tuple[int, int],
    seed: int,
) -> None:
    """Births at lagging versions, ends with and without a birth, commits, publications, failed groups that start afresh
    or are dropped, in any order; every ready subset is tried in each state.

    In the end, and so from any state, the run goes on: whenever all running groups have ended the barrier opens.
    """
    updates, rest = updates_and_rest
    max_staleness = (batches_ahead + 1) * updates - 1 + rest
    owners = _Owners(groups_per_step, max_staleness, updates, order, schedule)
    owners.admit()
    draw = random.Random(seed)
    # Some walks hardly publish, some train whatever there is at once, some have everything born long before.
    rare = {"settle without a version": 1, "end slow": 0.2, "renew": 0.3, "drop": 0.3, "end unborn": 0.4}
    weights = defaultdict(lambda: draw.choice([1, 5, 25]), rare)
    weights["publish"] = draw.choice([0.1, 1, 10])
    for _ in range(80):
        moves = owners.moves()
        owners.move(draw.choices(moves, [weights[name] for name in moves])[0], draw)
        owners.check()
    if owners.training:
        owners.settle(updates)
    owners.end_all()
    for _ in range(max_staleness + 2):
        while owners.unpublished:
            owners.publish()
        owners.admit()
        for group in list(owners.unborn):
            owners.birth(group)
        owners.end_all()
        owners.take()
        assert owners.training
        owners.settle(updates)
