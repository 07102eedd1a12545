"""The earliest that a trace can be trained by anyone who knows all durations in advance: a bound on every schedule.

A *schedule* decides which finished groups each batch takes, and when. It obeys the rules of asyncrl: slots come back
when a version is published, trajectories begin in the order of admission, at the first opportunity and under the newest
published version, and no group is trained after its due step. Nothing of asyncrl is used.

Symbols: batch n = 1 .. N takes P groups, is trained while version n - 1 is committed, and makes version n. Its training
lasts ``step_s`` and ends at T_n. R_n is the time at which all groups of batches 1 .. n have finished. Version n is
published at U_n, after version n - 1, ``publication_s[n - 1]`` after T_n or after U_(n-1). T_0 = U_0 = 0. Groups are
numbered in the order of admission, from 0.

**Times.** T_n >= step_s + max(T_(n-1), R_n), since the trainer does one step at a time; U_n = max(T_n, U_(n-1)) + lag.
With W slots, group i is admitted when version k(i) = max(0, ceil((i + 1 - W) / P)) is published: i + 1 groups were
admitted by then, and at most W hold a slot. Let f_i be the time at which group i finishes if each U_k is replaced by a
lower bound. Earlier admissions make nothing finish later: without a queue f_i = U_k(i) + duration, and the starts of a
queue that is served in order on c machines are monotone in the arrivals. So f_i is a lower bound, by induction over n,
and what remains is to bound R_n by the f_i of groups with k(i) < n; later ones cannot be in the first n batches.

**By count.** Batches 1 .. n have nP groups, so R_n is at least the nP-th smallest f_i.

**Newest birth.** Group i is born under a version u of at most b_i = max(k(i), floor((i - ceil(c / G)) / P)), for groups
of G trajectories. If u > k(i), it waited for room when version u was published: c trajectories were active, all of
groups before it, because they begin in order. Of those i groups the uP of the first u batches had finished, so the
other i - uP groups had c active trajectories: (i - uP) * G >= c. If nobody ever queues, b_i = k(i).

**By due steps.** So group i is due by b_i + S in every schedule. Let C_j be the number of groups with
b_i + S <= n - 1 + j. All of them are in batches 1 .. n + j. At most jP of them are in batches n + 1 .. n + j, so at
least C_j - jP of them are in the first n batches, and R_n is at least the (C_j - jP)-th smallest f_i among them. For
j < S they have k(i) < n; for larger j the bound by count is at least as good, because W <= (1 + S) * P.

Without a queue the bound is the optimum, and not only a bound, in every case that was tried:
``tests/benchmarks/test_clairvoyant.py`` goes through all schedules of small traces.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Trace", "earliest_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All that a schedule has to cope with. Example: two steps of one group of two trajectories, synchronous::

    Trace(durations_s=[[1.0, 3.0], [2.0, 2.0]], groups_per_step=1, max_staleness=0, slots=1, concurrency=2,
          step_s=0.5, publication_s=[0.25, 0.25])  # ends at 3 + 0.5 + 0.25 + 2 + 0.5
    """

    durations_s: Sequence[Sequence[float]]
    """For each group those of its trajectories; as many groups as the steps need."""
    groups_per_step: int
    max_staleness: int
    slots: int
    concurrency: int
    """Trajectories that may be active at once."""
    step_s: float
    publication_s: Sequence[float]
    """Time that it takes to publish versions 1, 2, ..; more than 0, so that no two are published at once."""

    @property
    def steps(self) -> int:
        """Batches that the groups make."""
        return len(self.durations_s) // self.groups_per_step

    @property
    def group_size(self) -> int:
        """G: trajectories of each group."""
        return len(self.durations_s[0])

    @property
    def queues(self) -> bool:
        """True if a trajectory may have to wait for room before it begins."""
        return self.concurrency < self.slots * self.group_size

    def admitted_with(self, group: int) -> int:
        """k(i): the version whose publication lets ``group`` in."""
        return max(0, -(-(group + 1 - self.slots) // self.groups_per_step))

    def newest_birth(self, group: int) -> int:
        """b_i: the newest version under which ``group`` is born in any schedule."""
        full = -(-self.concurrency // self.group_size)
        return max(self.admitted_with(group), (group - full) // self.groups_per_step)


class Rollouts:
    """Owns when the admitted groups began and finished."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._free_at = [0.0] * trace.concurrency
        self.born: list[float] = []
        self.finished: list[float] = []
        """Of each group, in the order of admission; so is ``born``."""

    def admit(self, version: int, now: float) -> None:
        """``version`` was published: its groups begin, in order, as soon as there is room."""
        while len(self.finished) < len(self._trace.durations_s):
            group = len(self.finished)
            if self._trace.admitted_with(group) > version:
                return
            self.born.append(max(now, self._free_at[0]))
            self.finished.append(max(self._run(now, duration) for duration in self._trace.durations_s[group]))

    def _run(self, now: float, duration: float) -> float:
        end = max(now, self._free_at[0]) + duration
        heapq.heapreplace(self._free_at, end)
        return end


def earliest_end(trace: Trace) -> float:
    """No schedule commits the last version of ``trace`` before this time."""
    rollouts = Rollouts(trace)
    rollouts.admit(0, 0.0)
    committed = published = 0.0
    for n in range(1, trace.steps + 1):
        committed = max(committed, _earliest_ready(trace, n, rollouts.finished)) + trace.step_s
        published = max(committed, published) + trace.publication_s[n - 1]
        rollouts.admit(n, published)
    return committed


def _earliest_ready(trace: Trace, n: int, finished: Sequence[float]) -> float:
    """The bound on R_n; ``finished`` has the groups with k(i) < n."""
    wanted = [(len(finished), n * trace.groups_per_step)]
    # (C, m): at least m of the first C groups are in the first n batches. The first is the bound by count.
    for ahead in range(trace.max_staleness):
        newest = n - 1 + ahead - trace.max_staleness
        due = sum(trace.newest_birth(group) <= newest for group in range(len(finished)))
        wanted.append((due, due - ahead * trace.groups_per_step))
    return max(sorted(finished[:among])[least - 1] for among, least in wanted if least > 0)
