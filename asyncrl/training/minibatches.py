"""Which groups of a batch each of its updates trains."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["group_parts"]


def group_parts(groups: int, *, minibatches: int, epochs: int, n: int) -> Iterator[list[int]]:
    """The positions of the groups of each update of step ``n``, in order: ``minibatches`` for each of ``epochs``.

    In each epoch every group is in one part. Parts differ by at most one group, and are empty if there are fewer groups
    than parts. Groups are shuffled anew for each epoch, with a seed of step and epoch: those that finished first are
    short or easy ones, and would be together in the first part. A step that is made once more has the same parts.
    """
    for epoch in range(epochs):
        order = list(range(groups))
        if minibatches > 1:
            random.Random(f"{n} {epoch}").shuffle(order)
        for part in range(minibatches):
            yield order[part * groups // minibatches : (part + 1) * groups // minibatches]
