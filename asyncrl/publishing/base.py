"""The seam that makes a policy version live on the sampling servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from asyncrl.sampling.base import ModelRef

__all__ = ["BUCKET_BYTES", "Publisher", "VersionKeeper"]

BUCKET_BYTES = 256 * 2**20
"""Of one piece of the weights: a server holds it beside its weights, and as base64 it is a third larger."""


class Publisher(Protocol):
    """Makes versions live. Real: ``LoraPublisher``, ``FullPublisher``. Fake: ``asyncrl.testing.ScriptedPublisher``."""

    @property
    def pins_versions(self) -> bool:
        """True if older versions stay available beside the newest, so that a trajectory can keep its own."""
        ...

    async def stage(self, version: int) -> None:
        """Export the learner's current parameters as ``version``; the learner may go on once this returns."""
        ...

    async def publish(self, version: int) -> float:
        """Make the staged ``version`` live on every server and verify it; versions are published in order.

        Returns the probe's largest log-probability difference. Raises ``PublicationError`` if no server is left,
        ``ProbeMismatch`` if a server applied something else.
        """
        ...

    def model_ref(self, version: int, anchor: int | None = None) -> ModelRef:
        """How to ask for ``version``, on a prefix that ``anchor`` computed (None: the same version)."""
        ...

    def pin(self, version: int) -> None:
        """A trajectory uses ``version`` from now on: keep it loaded until it is unpinned as often as it was pinned."""
        ...

    def unpin(self, version: int) -> None:
        """That trajectory ended. A version that nobody has pinned and that is not the newest may be unloaded."""
        ...


@runtime_checkable
class VersionKeeper(Protocol):
    """A publisher that can bring back older versions after its process was stopped or killed."""

    async def adopt(self, versions: Iterable[int]) -> frozenset[int]:
        """Make those of ``versions`` available again that it can, with the first publication, and say which.

        Called before that one; all are older than it. They are given up like any version that is not pinned. What else
        an earlier process has left of its versions is removed.
        """
        ...
