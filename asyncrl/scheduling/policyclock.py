"""The two versions of a run: what the learner has committed, and what the servers have published."""

from __future__ import annotations

from asyncrl.concurrency.notifier import Notifier
from asyncrl.errors import StalenessError

__all__ = ["PolicyClock"]


class PolicyClock:
    """Owns the committed and the published version. Requests are stamped with ``published`` at dispatch."""

    def __init__(self, version: int = 0) -> None:
        self.committed = version
        self.published = version
        self.arriving = version
        """The version that servers may already sample requests with; newer than ``published`` during an update."""
        self._changed = Notifier()

    def commit(self) -> int:
        """An optimizer step was taken: the new committed version."""
        self.committed += 1
        return self.committed

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
