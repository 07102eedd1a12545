"""What can be trained in time, by trying everything; nothing here knows the rule of ``staleness.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations

__all__ = ["openings", "trainable"]


def trainable(dues: Iterable[int], *, version: int, groups_per_step: int, updates: int = 1) -> bool:
    """True if some assignment of the groups to batches trains each in one that starts by its due step.

    Batches start at ``version``, ``version + updates``, .. and train up to ``groups_per_step`` groups.
    """
    left = sorted(due - version for due in dues)
    if not left:
        return True
    starts = range(0, left[-1] + 1, updates)
    last = tuple(max((k for k, start in enumerate(starts) if start <= due), default=-1) for due in left)
    return last[0] >= 0 and _assignable(last, (groups_per_step,) * len(starts))


@cache
def _assignable(dues: tuple[int, ...], free: tuple[int, ...]) -> bool:
    """``free[k]``: places left in batch k; ``dues[i]``: the last batch that group i may be in."""
    if not dues:
        return True
    first, *others = dues
    return any(
        _assignable(tuple(others), (*free[:step], free[step] - 1, *free[step + 1 :]))
        for step in range(first + 1)
        if free[step]
    )


def openings(
    ready: Iterable[int | None], running: Sequence[int], *, version: int, groups_per_step: int, updates: int = 1
) -> set[tuple[int, ...]]:
    """The due steps of every batch of ``groups_per_step`` ready groups that may be trained at ``version``.

    ``ready`` and ``running`` are due steps, None of a group that never got an age, which is never late; a batch that is
    shorter than ``groups_per_step`` has some of these. A batch may be trained if none of its groups is late, and all
    that is left can still be trained from the next batch on, which starts after ``updates`` more versions.
    """
    everyone = list(ready)
    ageless = everyone.count(None)
    dues = sorted(due for due in everyone if due is not None)
    return {
        batch
        for size in range(max(0, groups_per_step - ageless), groups_per_step + 1)
        for batch in set(combinations(dues, size))
        if min(batch, default=version) >= version
        and trainable(
            [*_without(dues, batch), *running],
            version=version + updates,
            groups_per_step=groups_per_step,
            updates=updates,
        )
    }


def _without(dues: Sequence[int], batch: Iterable[int]) -> list[int]:
    rest = list(dues)
    for due in batch:
        rest.remove(due)
    return rest
