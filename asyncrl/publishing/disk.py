"""DiskPublisher: all weights, replaced on running servers from a folder on disk.

One server holds one version. Requests that run during the update go on under the new weights, and the server says
which of their tokens are of which version; a trajectory cannot keep its version.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import anyio

from asyncrl.errors import ProtocolError, SamplingError
from asyncrl.learning.base import Learner
from asyncrl.publishing.base import Address
from asyncrl.publishing.delivery import Delivery
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.staging import Release, Staging
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.wire import PauseMode

__all__ = ["DiskPublisher"]

_KEPT = 2
# The newest, which a server that was away still has to read, and the one before it.


class DiskPublisher:
    """Publishes model folders to the servers of ``sampler``.

    ``directory``: where they are written, the same path on every server.
    ``pause_mode``: what becomes of running requests. ``retract`` computes their context again under the new weights,
    ``in_place`` lets them go on with the context of the old ones, ``abort`` ends them with what they have.
    ``probe``: None makes one for the learner's model.
    """

    def __init__(
        self,
        learner: Learner,
        sampler: SGLang,
        directory: Path,
        *,
        pause_mode: PauseMode = "retract",
        probe: Probe | None = None,
    ) -> None:
        self._sampler = sampler
        self._staging = Staging(learner, directory, probe)
        self._pause_mode = pause_mode
        self._releases: dict[int, Release] = {}
        self._delivery = Delivery(sampler, self._install)
        sampler.in_place_updates = pause_mode == "in_place"

    @property
    def pins_versions(self) -> bool:
        """A server holds one version."""
        return False

    async def stage(self, version: int) -> None:
        """Write the model's folder and note what the learner says about the probe."""
        self._releases[version] = await self._staging.stage(version)

    async def publish(self, version: int) -> float:
        """Update every server to the staged weights; see ``Publisher``."""
        difference = await self._delivery.to_all(self._releases[version])
        published = sorted(staged for staged in self._releases if staged <= version)
        for old in published[:-_KEPT]:
            await self._staging.remove(self._releases.pop(old))
        return difference

    def address(self, version: int, anchor: int | None = None) -> Address:
        """The base weights, with a namespace that keeps a new request from reusing the context of older ones."""
        return Address(adapter=None, extra_key=f"v{version if anchor is None else anchor}")

    def hold(self, version: int) -> None:
        """Nothing can be held."""

    def release(self, version: int) -> None:
        """Nothing was held."""

    async def _install(self, server: ServerControl, release: Release) -> float:
        await self._update(server, release)
        return await self._staging.check(server, release)

    async def _update(self, server: ServerControl, release: Release) -> None:
        label = str(release.version)
        try:
            await server.pause(self._pause_mode)
            await server.update_from_disk(release.folder, label)
            if self._pause_mode != "in_place":
                await server.flush()
            found = await server.weight_label()
            if found != label:
                raise ProtocolError(f"{server.url} holds weights {found!r} after an update to {label!r}")
        except BaseException:
            # The weights may be half replaced: no request may go on under them, so this comes before continue_.
            self._sampler.quarantine(server.url, f"its update to version {label} failed")
            with anyio.CancelScope(shield=True), suppress(SamplingError):
                await server.continue_()
            raise
        with anyio.CancelScope(shield=True):
            await server.continue_()
