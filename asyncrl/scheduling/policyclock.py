"""The versions of a run: what the learner has committed, what is staged of it, and what the servers have published."""

from __future__ import annotations

from asyncrl.concurrency.notifier import Notifier
from asyncrl.errors import StalenessError

__all__ = ["PolicyClock"]


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

    def commit(self) -> int:
        """An optimizer step was taken: the new committed version."""
        self.committed += 1
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
