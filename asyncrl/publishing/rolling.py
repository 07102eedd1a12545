"""RollingPublisher: all weights, on servers that may hold different versions at the same time.

A trajectory keeps its version because some server keeps it: a new version goes to part of the servers, and to the
others once no trajectory has pinned what they have. Nothing that is sampled crosses an update: a server that is about
to change gets no request, and what it has of ours is answered with the tokens so far and goes on at another server that
holds the same version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import anyio

from asyncrl.errors import (
    ProbeMismatch,
    PublicationError,
    SamplingError,
    ServerUnavailable,
    StalenessError,
    WeightsOverwritten,
)
from asyncrl.learning.base import Learner
from asyncrl.publishing.carriers import Carrier
from asyncrl.publishing.delivery import JointUpdate
from asyncrl.publishing.full import replace_weights
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.staging import ServerPublisher, StagedVersion
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.base import ModelRef
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.labels import Writer

__all__ = ["RollingPublisher", "may_change"]


def may_change(serving: Mapping[str, int], pinned: Collection[int], newest: int) -> list[str]:
    """Which servers may take ``newest`` now; no pinned version loses its last server.

    ``serving``: the version that each server has or is about to have. Servers whose version is not pinned all change.
    Of a version that is pinned half of the servers change, and only if nobody serves ``newest``: what follows its
    publication are new trajectories, for which the others are freed as the old ones end.

    Four servers at version 0, which is pinned: two take version 1. Then version 2 comes while 0 and 1 are pinned: one
    of each takes it. Version 3, all pinned: one of the two with version 2. Version 4: none, until one is unpinned.
    """
    urls_of: dict[int, list[str]] = {}
    for url, version in serving.items():
        urls_of.setdefault(version, []).append(url)
    served = newest in urls_of
    changing: list[str] = []
    for version, urls in urls_of.items():
        if version == newest:
            continue
        if version not in pinned:
            changing += urls
        elif not served:
            changing += urls[: len(urls) // 2]
    return changing


class RollingPublisher(ServerPublisher):
    """Publishes all weights to the servers of ``fleet``, which must be at least two.

    ``carrier``: how they travel. ``probe``: None makes one for the learner's model. ``writer``: whose weights they are;
    None is a run of its own.

    With every server at another version that is pinned, a publication waits until one is unpinned. With one server left
    it waits until nothing is pinned; a trajectory that starts while that server changes waits for what it asked for,
    until the client's outage limit, and is tried again.
    """

    def __init__(
        self,
        learner: Learner,
        fleet: ServerFleet,
        carrier: Carrier,
        *,
        probe: Probe | None = None,
        writer: Writer | None = None,
    ) -> None:
        super().__init__(learner, fleet, carrier.store, probe)
        self._carrier = carrier
        self._target: StagedVersion | None = None
        # Where every server is to get; set when its publication begins.
        self._targets: dict[str, int] = {}
        # Servers that are being changed, and to what.
        self._locks: dict[str, anyio.Lock] = {}
        self._differences: dict[int, float] = {}
        self._mismatch: ProbeMismatch | WeightsOverwritten | None = None
        fleet.claim(writer or Writer(), self._restore)

    async def publish(self, version: int) -> float:
        """Returns when one server serves ``version``; the others follow as they are let go. See ``Publisher``."""
        self._target = self._staged[version]
        self._differences.clear()
        self._roll()
        await self._served(version)
        self.newest = version
        # The version before it is let go by this, unless a trajectory has pinned it.
        self._give_up_unused()
        return self._differences[version]

    def model_ref(self, version: int, anchor: int | None = None) -> ModelRef:
        """The base weights, on a server that holds them. Asking for a version that is retired is a bug."""
        if version > self.newest or version not in self._staged:
            raise StalenessError(f"version {version} is on no server; published are {sorted(self._staged)}")
        return ModelRef(adapter=None, extra_key=f"v{version if anchor is None else anchor}", replica=True)

    def _give_up_unused(self) -> None:
        self._roll()
        self._remove_unused()

    async def _served(self, version: int) -> None:
        """Wait for a server with ``version``, however long what all servers have is pinned."""

        def decided() -> bool:
            versions = self._fleet.versions
            return version in versions.values() or self._mismatch is not None or not versions

        while True:
            await self._fleet.wait_until(decided)
            if self._mismatch is not None:
                raise self._mismatch
            if version in self._fleet.versions.values():
                return
            try:
                await self._fleet.wait_live()
            except ServerUnavailable as error:
                raise PublicationError(f"no server took version {version}: {error}") from error

    @property
    def _pinned(self) -> set[int]:
        # Whoever starts next pins the published version.
        return {*self._pins, self.newest}

    @property
    def _serving(self) -> dict[str, int]:
        """What each server has or is about to have; a server that is away has nothing."""
        has = {url: version for url, version in self._fleet.versions.items() if version is not None}
        return has | self._targets

    def _roll(self) -> None:
        """Start the changes that are possible now."""
        if self._target is None:
            return
        # Before the first publication servers hold nothing of ours.
        serving = self._serving
        fresh = [url for url in self._fleet.versions if url not in serving]
        # The last server left serves the published version to whoever starts; it changes when nobody is under way.
        pinned = self._pinned if len(serving) > 1 else set(self._pins)
        changing = {*fresh, *may_change(serving, pinned, self._target.version)} - self._targets.keys()
        for server in self._fleet.live:
            if server.url in changing:
                self._targets[server.url] = self._target.version
                self._fleet.spawn(partial(self._change, server, self._target))

    async def _change(self, server: ServerControl, staged: StagedVersion) -> None:
        """Bring one server to ``staged``; one that fails is quarantined until it could be restored."""
        limit_s = self._fleet.timeouts.publication_s
        try:
            with anyio.fail_after(limit_s):
                await self._install(server, staged)
        except (SamplingError, PublicationError, TimeoutError) as error:
            if isinstance(error, ProbeMismatch | WeightsOverwritten):
                self._mismatch = error
            reason = str(error) or f"it did not take version {staged.version} within {limit_s:g} s"
            self._fleet.quarantine(server.url, reason)
        finally:
            self._targets.pop(server.url, None)
        # A newer version may have come meanwhile, or this one still needs a server.
        self._give_up_unused()

    async def _restore(self, server: ServerControl) -> None:
        """Give a server that was away what is missed most: the newest version, or a pinned one that no server has."""
        if self._target is None:
            await server.model_info()
            return
        installed: StagedVersion | None = None
        while installed is not (staged := self._missed(server.url)):
            self._targets[server.url] = staged.version
            try:
                await self._install(server, staged)
            finally:
                self._targets.pop(server.url, None)
            installed = staged

    def _missed(self, url: str) -> StagedVersion:
        assert self._target is not None, "asked only after the first publication began"
        served = {version for other, version in self._serving.items() if other != url}
        if self._target.version in served:
            for version in sorted(self._pins):
                if version not in served and version in self._staged:
                    return self._staged[version]
        return self._target

    async def _install(self, server: ServerControl, staged: StagedVersion) -> None:
        """Replace the weights of a server that has no request of ours."""
        label = self._fleet.labels.give(staged.version)
        alone = JointUpdate([server.url], returning=True)
        # A change and a return may meet on one server; pauses and updates of the two must not interleave.
        async with self._locks.setdefault(server.url, anyio.Lock()):
            self._fleet.serving(server.url, None)
            await self._fleet.vacate(server.url)
            await replace_weights(
                self._fleet,
                server,
                label,
                lambda: self._carrier.update(server, staged.version, label, alone),
                pause_mode="abort",
                flush=True,
            )
            self._differences[staged.version] = await self._staging.check(server, staged)
            self._fleet.serving(server.url, staged.version)

    def _remove_unused(self) -> None:
        in_use = self._pinned | set(self._serving.values())
        for version in [old for old in self._staged if old < self.newest and old not in in_use]:
            self._fleet.spawn(partial(self._staging.remove, self._staged.pop(version)))
