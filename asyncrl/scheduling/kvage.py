"""Which version a trajectory samples with next, and whose KV it may reuse (DESIGN.md 4.8, 4.9).

A pure rule. Each version has its own prefix-cache namespace, so KV of other weights is never reused by accident; a
trajectory that may reuse an older prefix asks in the namespace of its *anchor*, the version that computed that prefix.

Worked example, ``max_staleness=1``: a trajectory started under version 4, so its anchor is 4. Version 5 is published:
it moves to 5 and keeps the prefix (age 1). Version 6 is published: the prefix would have age 2. ``hold`` samples on
with 5; ``refill`` samples with 6 and computes the prefix anew, the anchor is then 6.

Where servers change their weights under a request (full weights), the age counts from what is *arriving*: a request
that leaves while servers are brought to 6 may be sampled by 6, so it must not reuse the prefix of 4 any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.scheduling.rules import KVCache

__all__ = ["Placement", "place"]


@dataclass(slots=True, kw_only=True)
class Placement:
    """``version`` samples, on a prefix that ``anchor`` computed. Not to be changed, but quick to make."""

    version: int
    anchor: int


def place(
    current: Placement | None, published: int, kv_cache: KVCache | None, *, arriving: int | None = None
) -> Placement:
    """Where the next segment is sampled. ``kv_cache`` is None for trajectories that keep their first version.

    ``arriving``: the version that may sample this request at the latest; None is ``published``.
    """
    if current is None:
        return Placement(version=published, anchor=published)
    if kv_cache is None:
        return current
    latest = published if arriving is None else arriving
    if latest - current.anchor <= kv_cache.max_staleness:
        return Placement(version=published, anchor=current.anchor)
    if kv_cache.on_limit == "hold":
        return current
    return Placement(version=published, anchor=published)
