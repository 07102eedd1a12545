"""LoraPublisher: each version is an immutable adapter under a name of its own.

Loading an adapter disturbs nobody, and old versions stay beside the newest: keeping a trajectory on its version is
keeping a name. A version is unloaded when nobody uses it, by count and never by age, and what was staged of it is
removed only after every server has let go of it: a server reads an adapter's folder again if a late request names it
after it was unloaded, and one that comes back is given every version in use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from asyncrl.errors import ConfigError, ProbeMismatch, SamplingError, StalenessError
from asyncrl.learning.base import Learner
from asyncrl.publishing.carriers import is_local, payload
from asyncrl.publishing.delivery import Delivery, JointUpdate
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.staging import Copies, Folders, ServerPublisher, StagedVersion, Store
from asyncrl.publishing.unloading import Unloading
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.base import ModelRef
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.labels import Writer

__all__ = ["AdapterCarrier", "DiskAdapters", "LoraPublisher", "TensorAdapters"]

_KEPT = 2
# The newest, and the one before it for requests that were stamped while the newest was published.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class AdapterCarrier(Protocol):
    """How an adapter travels to one server. Real: ``DiskAdapters``, ``TensorAdapters``."""

    @property
    def store(self) -> Store:
        """Where versions are staged."""
        ...

    async def load(self, server: ServerControl, name: str, version: int) -> None:
        """Load the staged ``version`` as ``name``."""
        ...


class DiskAdapters:
    """Each server reads the version's folder, which has the same path there. ``own``: see ``Folders``."""

    def __init__(self, learner: Learner, directory: Path, *, own: bool = False) -> None:
        self.store = Folders(learner, directory, own=own, sealed=True)

    async def load(self, server: ServerControl, name: str, version: int) -> None:
        """Have ``server`` read the folder of ``version``."""
        await server.load_adapter(name, self.store.folder(version))


class TensorAdapters:
    """The adapter is in the request.

    A server cannot bring such an adapter back by itself: a late request for an unloaded one is refused.
    """

    def __init__(self, learner: Learner) -> None:
        self.store = Copies(learner)
        self._learner = learner
        # Making a payload takes a processor; two keep one server from waiting for another.
        self._limiter = anyio.CapacityLimiter(2)

    async def load(self, server: ServerControl, name: str, version: int) -> None:
        """Send the adapter of ``version``."""
        config = await self._learner.adapter_config()
        ranks = await server.tensor_ranks()
        make = partial(payload, self.store.weights(version), None, self.store.device, is_local(server.url))
        bucket, text = await anyio.to_thread.run_sync(make, limiter=self._limiter)
        await server.load_adapter_tensors(name, config, [text] * ranks)
        # Not before the answer: until then the server may read this memory.
        del bucket


class LoraPublisher(ServerPublisher):
    """Publishes the learner's adapter to the servers of ``fleet``.

    ``carrier``: how it travels.
    ``name``: how adapters' names begin, for whoever reads them. ``probe``: None makes one for the learner's model.
    ``writer``: whose adapters they are; None is a run of its own. Left-over adapters of an earlier process of the same
    run are unloaded, those of other runs never.
    """

    def __init__(
        self,
        learner: Learner,
        fleet: ServerFleet,
        carrier: AdapterCarrier,
        name: str,
        *,
        probe: Probe | None = None,
        writer: Writer | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError.for_value("policy.name", name, "letters, digits, '.', '_' and '-'")
        writer = writer or Writer()
        super().__init__(learner, fleet, carrier.store, probe)
        self._carrier = carrier
        # A name is never used twice, not even by a run that resumes: servers may remember what it was.
        self._prefix = f"{name}-{writer.run}-{writer.process}"
        self._ours = re.compile(rf"{re.escape(name)}-{writer.run}-[0-9a-f]{{8}}-v\d+")
        self._unloading = Unloading(fleet, self._staging.remove)
        self._delivery = Delivery(fleet, self._install)
        fleet.claim(writer, self._delivery.restore)

    async def adopt(self, versions: Iterable[int]) -> frozenset[int]:
        """Those of ``versions`` that an earlier process has left on disk; what else it has left there is removed."""
        store = self._carrier.store
        adopted = await store.adopt(versions)
        for error in store.damaged:
            self._fleet.notice("adapter_damaged", reason=str(error))
        for version, reference in adopted.items():
            self._staged[version] = StagedVersion(version=version, reference=reference)
            if reference is None:
                self._fleet.notice("version_not_checked", version=version, reason="nothing was kept to compare with")
        return frozenset(adopted)

    async def publish(self, version: int) -> float:
        """Load the staged adapter everywhere; see ``Publisher``."""
        difference = await self._delivery.to_all(self._staged[version])
        self.newest = version
        self._give_up_unused()
        return difference

    def model_ref(self, version: int, anchor: int | None = None) -> ModelRef:
        """The adapter's name. Asking for a version that was never published or is retired is a bug."""
        if version > self.newest or version not in self._staged:
            raise StalenessError(f"version {version} is not loaded; loaded are {sorted(self._staged)}")
        return ModelRef(adapter=self._name(version), extra_key=f"v{version if anchor is None else anchor}")

    async def leave(self) -> None:
        """Unload from all servers in use what this run has loaded there; what fails is left."""

        async def leave(server: ServerControl) -> None:
            names: set[str] = set()
            with suppress(SamplingError):
                names = await server.adapters()
            for name in sorted(filter(self._ours.fullmatch, names)):
                # One that is being unloaded already is refused.
                with suppress(SamplingError):
                    await server.unload_adapter(name)

        async with anyio.create_task_group() as tasks:
            for server in self._fleet.live:
                tasks.start_soon(leave, server)

    def _name(self, version: int) -> str:
        return f"{self._prefix}-v{version}"

    async def _install(self, server: ServerControl, staged: StagedVersion, together: JointUpdate) -> float:
        """Load what the server lacks, check it, and sweep out what nobody will ask for again."""
        below = await server.weight_label()
        # Asking first, because the answer to an earlier load may have been lost after the server had done it.
        loaded = await server.adapters()
        wanted = [wanted for wanted in self._staged.values() if wanted.version <= staged.version]
        unchecked = [staged]
        for other in wanted:
            missing = self._name(other.version) not in loaded
            if missing:
                await self._carrier.load(server, self._name(other.version), other.version)
            if other is not staged and (missing or together.returning):
                # The server may be another program than the one that was compared when this version was published.
                unchecked.append(other)
        differences = [await self._check(server, other, below) for other in unchecked]
        self._fleet.labels.hold(server.url, below)
        ours = {self._name(version) for version in self._staged}
        self._unloading.sweep(server, [name for name in loaded - ours if self._ours.fullmatch(name)])
        return differences[0]

    async def _check(self, server: ServerControl, staged: StagedVersion, below: str) -> float:
        try:
            return await self._staging.check(server, staged, adapter=self._name(staged.version))
        except ProbeMismatch as error:
            raise ProbeMismatch(f"{error}; the weights below the adapter are labelled {below!r}") from error

    def _give_up_unused(self) -> None:
        published = sorted(version for version in self._staged if version <= self.newest)
        for version in published[:-_KEPT]:
            if version not in self._pins:
                self._unloading.retire(self._name(version), self._staged.pop(version))
