"""The barrier's rule: may this batch be trained, and everything that stays outstanding still be trained in time?

Symbols: P groups a batch, U updates (optimizer steps) a batch, each of which makes a version, S the bound, v the
version that is committed when a batch starts. The updates of a batch train at v, v + 1, .., v + U - 1, so a token of
version u is within the bound at each of them if v + U - 1 - u <= S. A group born under version u is *due* by
u + S - (U - 1): the last version that may be committed when its batch starts. There has to be one: S >= U - 1. A batch
may make fewer versions than U, if parts of it have no gradient, but never more.

**The rule.** After a batch that leaves at most version v, every group that stays outstanding must fit into later
batches of P groups, the first of which starts at v or before, the next at v + U or before, .., none later than its due
step::

    for every d >= v:   #{outstanding groups due by d}  <=  ((d - v) // U + 1) * P,   and none is due before v

This is the earliest-deadline-first test. *Necessary*, if each batch makes U versions: (d - v) // U + 1 batches start at
one of v, v + U, .. up to d. *Sufficient*: taking the P earliest due groups in each batch, by induction over the
batches, trains the i-th group in due order in batch k = (i - 1) // P, which starts at v + k U or before; if group i is
due by d there are at least i groups due by d, so i <= ((d - v) // U + 1) * P, k <= (d - v) // U, and v + k U is at most
d. A batch that makes fewer versions than U leaves a smaller v, for which the right side is no smaller: what was allowed
stays so. Groups not born yet have no due step and are not counted.

**A birth never breaks it.** Let v be the version that the batch under way will leave at most, or the committed one if
there is none, and p the published one. L batches, the one under way among them, may make or have made versions that are
not published, so v - p <= L U. The slots (admission.py) bound outstanding groups plus groups of unpublished batches by
(1 + B) * P with B = (S + 1) // U - 1 batches ahead, so at most (1 + B - L) * P groups are outstanding. A group born now
is due by p + S - U + 1 >= v + S - U + 1 - L U, and no outstanding group is due later. For d from there on the count is
at most (1 + B - L) * P, and ((d - v) // U + 1) * P >= ((S + 1) // U - 1 - L + 1) * P is just that; for earlier d the
birth changes nothing. So the trainer can always make progress once enough groups have ended: the barrier waits for
samples, never for itself. With U = 1 all this is: due by u + S, (1 + S) * P slots.

**A group that ends unborn** (each member truncated or failed before its first request) has no age, so any batch may
train it and it is not counted. It must not take the place of a group that is counted: with N_d born groups due by d,
a batch that leaves version v must hold at least ``N_d - ((d - v) // U + 1) * P`` born ones, for every d. ``needed`` is
the largest of these numbers. *Necessary*: of the N_d groups due by d the later batches train at most that many.
*Sufficient*: if some batch of ready groups may go, so may the one of the ``needed`` earliest due ready groups, for
taking min(needed, R_d) of the R_d ready ones due by d leaves no more than allowed in both cases. All other places are
free for unborn groups. Waiting for ``needed`` born groups always ends: P places are enough for them (the rule held at
v - U, which allowed P more), and once every born group has ended, the earliest due ones are ready. Nor do unborn groups
keep anything from being born: they only take slots, which the count above includes.

Worked example: P = 2, U = 1, S = 2, committed 5. Born under 4: four groups (due 6); born under 5: two (due 7). Taking
two of the older leaves, at version 6, two due by 6 (at most 2) and four due by 7 (at most 4): allowed. Taking the two
younger leaves four due by 6: refused, although none of them is due *now*. With three more that ended unborn, a batch
may hold none of these: two of the older must go first. One that was born under 3 (due 5) and still runs keeps the
barrier closed, however many unborn groups are ready. With U = 2 and S = 5 a group born under 4 is due by 8, for its
batch trains at 8 and 9, and there are slots for (5 + 1) // 2 = 3 batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["batches_ahead", "due_step", "feasible", "needed", "places"]


def due_step(version: int, *, max_staleness: int, updates: int = 1) -> int:
    """The last version that may be committed when the batch starts that trains a group born under ``version``."""
    return version + max_staleness - (updates - 1)


def batches_ahead(max_staleness: int, updates: int = 1) -> int:
    """B: batches that may be sampled beside the current one; negative if the bound is too small for one batch."""
    return (max_staleness + 1) // updates - 1


def places(due: int, *, version: int, groups_per_step: int, updates: int = 1) -> int:
    """Groups that are trained in batches which start at ``due`` or before, if the next starts at ``version``."""
    return ((due - version) // updates + 1) * groups_per_step if due >= version else 0


def feasible(
    outstanding_due: Mapping[int, int],
    *,
    version: int,
    groups_per_step: int,
    updates: int = 1,
    taken: Mapping[int, int] = MappingProxyType({}),
) -> bool:
    """True if ``outstanding_due`` (due step -> born groups, at most S + 1 steps) can be trained from ``version`` on.

    ``updates``: versions that a batch makes, at most. ``taken``: those groups that a batch takes before. O(S log S) for
    a bound of S, whatever the number of groups.
    """
    count = 0  # as in ``needed``, but made to be asked at each event: no copy, and no look beyond the first refusal
    for due in sorted(outstanding_due):
        count += outstanding_due[due] - taken.get(due, 0)
        if count > places(due, version=version, groups_per_step=groups_per_step, updates=updates):
            return False
    return True


def needed(outstanding_due: Mapping[int, int], *, version: int, groups_per_step: int, updates: int = 1) -> int:
    """How many of the earliest due groups of ``outstanding_due`` a batch must hold, if it leaves ``version``.

    The other places may go to groups without an age. If that many groups are not ready, no batch may go.
    """
    count = most = 0
    for due in sorted(outstanding_due):
        count += outstanding_due[due]
        most = max(most, count - places(due, version=version, groups_per_step=groups_per_step, updates=updates))
    return most
