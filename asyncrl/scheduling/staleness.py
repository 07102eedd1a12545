"""The barrier's rule: may this batch be committed, and everything that stays outstanding still be trained in time?

Symbols: P groups a step, S the bound, v the committed version. A group born under version u is *due* by u + S: the last
version at which the committed policy may be when it is trained.

**The rule.** After the commit to v every group that stays outstanding must fit into the steps v, v + 1, .. with P
groups each, none later than its due step::

    for every d:   #{outstanding groups due by d}  <=  (d - v + 1) * P

This is the earliest-deadline-first test. *Necessary*: the steps v .. d train at most (d - v + 1) * P groups.
*Sufficient*: taking the P earliest due groups in each step, by induction over the steps, trains the i-th group in due
order at step v + (i - 1) // P; if group i is due by d there are at least i groups due by d, so i <= (d - v + 1) * P
and that step is at most d. Groups not born yet have no due step and are not counted.

**A birth never breaks it.** Let the published version lag L = v - p behind the committed one. The slots (admission.py)
bound outstanding groups plus groups of unpublished batches by (1 + S) * P, and L batches are unpublished, so at most
(1 + S - L) * P groups are outstanding. A group born now is due by p + S = v + S - L, and no outstanding group is due
later. For d >= v + S - L the count is at most (1 + S - L) * P <= (d - v + 1) * P; for earlier d the birth changes
nothing. So the trainer can always make progress once enough groups have ended: the barrier waits for samples, never
for itself.

**A group that ends unborn** (each member truncated or failed before its first request) has no age, so any step may
train it and it is not counted. It must not take the place of a group that is counted: with N_d born groups due by d,
a batch that is trained at v - 1 must hold at least ``N_d - (d - v + 1) * P`` born ones, for every d. ``needed`` is the
largest of these numbers. *Necessary*: of the N_d groups due by d the later steps train at most (d - v + 1) * P.
*Sufficient*: if some batch of ready groups may go, so may the one of the ``needed`` earliest due ready groups, for
taking min(needed, R_d) of the R_d ready ones due by d leaves at most (d - v + 1) * P in both cases. All other places
are free for unborn groups. Waiting for ``needed`` born groups always ends: P places are enough for them (the rule held
at v - 1, so N_d <= (d - v + 2) * P), and once every born group has ended, the earliest due ones are ready. Nor do
unborn groups keep anything from being born: they only take slots, which the count above includes.

Worked example: P = 2, S = 2, committed 5. Born under 4: four groups (due 6); born under 5: two (due 7). Taking two of
the older leaves, at version 6, two due by 6 (at most 2) and four due by 7 (at most 4): allowed. Taking the two
younger leaves four due by 6: refused, although none of them is due *now*. With three more that ended unborn, a batch
may hold none of these: two of the older must go first. One that was born under 3 (due 5) and still runs keeps the
barrier closed, however many unborn groups are ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["feasible", "needed"]


def feasible(
    outstanding_due: Mapping[int, int],
    *,
    version: int,
    groups_per_step: int,
    taken: Mapping[int, int] = MappingProxyType({}),
) -> bool:
    """True if ``outstanding_due`` (due step -> born groups, at most S + 1 steps) can be trained from ``version`` on.

    ``taken``: those of them that a batch takes before. O(S log S) for a bound of S, whatever the number of groups.
    """
    count = 0  # as in ``needed``, but made to be asked at each event: no copy, and no look beyond the first refusal
    for due in sorted(outstanding_due):
        count += outstanding_due[due] - taken.get(due, 0)
        if count > max(0, due - version + 1) * groups_per_step:
            return False
    return True


def needed(outstanding_due: Mapping[int, int], *, version: int, groups_per_step: int) -> int:
    """How many of the earliest due groups of ``outstanding_due`` a batch must hold, if its commit makes ``version``.

    The other places may go to groups without an age. If that many groups are not ready, no batch may go.
    """
    count = most = 0
    for due in sorted(outstanding_due):
        count += outstanding_due[due]
        most = max(most, count - max(0, due - version + 1) * groups_per_step)
    return most
