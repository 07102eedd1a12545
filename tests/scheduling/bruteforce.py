"""What can be trained in time, by trying everything; nothing here knows the rule of ``staleness.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations

__all__ = ["openings", "trainable"]


def trainable(dues: Iterable[int], *, version: int, groups_per_step: int) -> bool:
    """True if some assignment of the groups to the steps ``version``, ``version + 1``, .. trains each by its due step.

    A step trains up to ``groups_per_step`` groups.
    """
    left = tuple(sorted(due - version for due in dues))
    if not left:
        return True
    return left[0] >= 0 and _assignable(left, (groups_per_step,) * (left[-1] + 1))


@cache
def _assignable(dues: tuple[int, ...], free: tuple[int, ...]) -> bool:
    """``free[k]``: places left in step k."""
    if not dues:
        return True
    first, *others = dues
    return any(
        _assignable(tuple(others), (*free[:step], free[step] - 1, *free[step + 1 :]))
        for step in range(first + 1)
        if free[step]
    )


def openings(
    ready: Iterable[int | None], running: Sequence[int], *, version: int, groups_per_step: int
) -> set[tuple[int, ...]]:
    """The due steps of every batch of ``groups_per_step`` ready groups that may be trained at ``version``.

    ``ready`` and ``running`` are due steps, None of a group that never got an age, which is never late; a batch that is
    shorter than ``groups_per_step`` has some of these. A batch may be trained if none of its groups is late, and all
    that is left can still be trained from the next step on.
    """
    everyone = list(ready)
    ageless = everyone.count(None)
    dues = sorted(due for due in everyone if due is not None)
    return {
        batch
        for size in range(max(0, groups_per_step - ageless), groups_per_step + 1)
        for batch in set(combinations(dues, size))
        if min(batch, default=version) >= version
        and trainable([*_without(dues, batch), *running], version=version + 1, groups_per_step=groups_per_step)
    }


def _without(dues: Sequence[int], batch: Iterable[int]) -> list[int]:
    rest = list(dues)
    for due in batch:
        rest.remove(due)
    return rest
