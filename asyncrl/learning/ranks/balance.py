"""Which rank computes which pass.

The ranks gather each layer's weights together, so the passes of a round run side by side and a round takes as long as
its costliest pass. With costs c_1 >= c_2 >= .. and W ranks, whichever way passes are put into rounds of at most W, the
k-th costliest round costs at least c_((k-1)W+1): the k rounds that cost most would else hold fewer than (k-1)W+1 of the
passes that cost at least that. Rounds of W neighbours in that order cost just that, so their sum is the least there is.

A rank for which the last round has no pass repeats the cheapest one of it, and what comes of that does not count:
every rank has as many passes as the others, none of them empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Share", "rounds", "time_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A pass that a rank computes."""

    index: int
    counts: bool
    """False for one that another rank computes too, so that all are busy."""


def rounds(costs: Sequence[float], ranks: int) -> list[list[Share]]:
    """For each round the share of each rank.

    Example: costs (5, 1, 4) and two ranks give passes 0 and 2, and then pass 1 twice, which counts once.
    """
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    found = []
    for start in range(0, len(order), ranks):
        indices = order[start : start + ranks]
        shares = [Share(index=index, counts=True) for index in indices]
        shares += [Share(index=indices[-1], counts=False)] * (ranks - len(shares))
        found.append(shares)
    return found


def time_of(costs: Sequence[float], ranks: int) -> float:
    """What ``rounds`` takes: the sum of the costliest pass of each."""
    return sum(sorted(costs, reverse=True)[::ranks])
