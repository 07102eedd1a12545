"""The versions of a run: what is committed and published, and with which of them a trajectory samples next.

``PolicyClock`` owns the first; ``place`` is the rule for the second, and says whose KV may be reused.

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

from asyncrl.concurrency.notifier import Notifier
from asyncrl.errors import StalenessError
from asyncrl.scheduling.rules import KVCache

__all__ = ["Placement", "PolicyClock", "place"]


class PolicyClock:
    """Owns the committed, the staged and the published version, -1 where there is none yet.

    Requests are stamped with ``published`` at dispatch.
    """

    def __init__(self, version: int = 0) -> None:
        self.committed = version
        self.staged = version
        """The newest version that the publisher has a copy of, so that the learner may go on."""
        self.published = version
        self.arriving = version
        """The version that servers may already sample requests with; newer than ``published`` during an update."""
        self._changed = Notifier()

    def commit(self, versions: int = 1) -> int:
        """So many optimizer steps were taken, of one batch: the new committed version."""
        self.committed += versions
        return self.committed

    def stage(self, version: int) -> None:
        """The publisher has a copy of ``version``. The first is the one with which the learner begins."""
        if self.committed < 0:
            self.committed = version
        if not self.staged < version <= self.committed:
            raise StalenessError(f"staged version {version} after {self.staged}, with {self.committed} committed")
        self.staged = version

    def arrive(self, version: int) -> None:
        """Servers are brought to ``version`` from now on, under the requests that they have."""
        self.arriving = version

    def publish(self, version: int) -> None:
        """Every server acknowledged ``version``."""
        if not self.published < version <= self.committed:
            raise StalenessError(f"published version {version} after {self.published}, with {self.committed} committed")
        self.published = version
        self.arriving = max(self.arriving, version)
        self._changed.notify()

    async def wait_published(self, version: int) -> None:
        """Wait until ``version`` or a newer one is published."""
        await self._changed.wait_until(lambda: self.published >= version)


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
