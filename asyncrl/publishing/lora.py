"""LoraPublisher: each version is an immutable adapter under a name of its own.

Loading an adapter disturbs nobody, and old versions stay beside the newest: keeping a trajectory on its version is
keeping a name. A version is unloaded when nobody uses it, by count and never by age, and what was staged of it is
removed only after every server has let go of it: a server reads an adapter's folder again if a late request names it
after it was unloaded, and one that comes back is given every version in use.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread
import numpy as np

from asyncrl.errors import ConfigError, RequestRefused, SamplingError, StalenessError
from asyncrl.learning.base import Learner
from asyncrl.publishing.base import Address
from asyncrl.publishing.carriers import is_local
from asyncrl.publishing.delivery import Delivery, Round
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.staging import Copies, Folders, Release, Staging, Store
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.sglang import SGLang

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
    """Each server reads the version's folder, which has the same path there."""

    def __init__(self, learner: Learner, directory: Path) -> None:
        self.store = Folders(learner, directory)

    async def load(self, server: ServerControl, name: str, version: int) -> None:
        """See ``AdapterCarrier``."""
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
        """See ``AdapterCarrier``."""
        config = await self._learner.adapter_config()
        ranks = await server.tensor_ranks()
        make = partial(_payload, self.store.weights(version), is_local(server.url))
        bucket, text = await anyio.to_thread.run_sync(make, limiter=self._limiter)
        await server.load_adapter_tensors(name, config, [text] * ranks)
        # Not before the answer: until then the server may read this memory.
        del bucket


class LoraPublisher:
    """Publishes the learner's adapter to the servers of ``sampler``.

    ``carrier``: how it travels.
    ``run_name``: runs that share servers need different ones; left-over adapters of an earlier process of the same run
    are unloaded. ``probe``: None makes one for the learner's model.
    """

    def __init__(
        self, learner: Learner, sampler: SGLang, carrier: AdapterCarrier, run_name: str, *, probe: Probe | None = None
    ) -> None:
        if not _NAME.fullmatch(run_name):
            raise ConfigError.for_value("policy.name", run_name, "letters, digits, '.', '_' and '-'")
        self._sampler = sampler
        self._carrier = carrier
        self._staging = Staging(learner, carrier.store, probe)
        # A name is never used twice, not even by a run that resumes: servers may remember what it was.
        self._prefix = f"{run_name}-{uuid.uuid4().hex[:8]}"
        self._ours = re.compile(re.escape(run_name) + r"-[0-9a-f]{8}-v\d+")
        self._releases: dict[int, Release] = {}
        self.newest = -1
        """The newest published version; -1: none."""
        self._holders: Counter[int] = Counter()
        self._unloading: set[str] = set()
        self._delivery = Delivery(sampler, self._install)

    @property
    def pins_versions(self) -> bool:
        """Older versions stay loaded while somebody holds them."""
        return True

    async def stage(self, version: int) -> None:
        """Keep the adapter and note what the learner says about the probe."""
        self._releases[version] = await self._staging.stage(version)

    async def adopt(self, versions: Iterable[int]) -> frozenset[int]:
        """See ``VersionKeeper``. Only adapters on disk outlive a process."""
        store = self._carrier.store
        adopted = await store.adopt(versions) if isinstance(store, Folders) else frozenset[int]()
        for version in adopted:
            # Nobody compares an older version with the probe again.
            self._releases[version] = Release(version=version, reference=np.empty(0, dtype=np.float32))
        return adopted

    async def publish(self, version: int) -> float:
        """Load the staged adapter everywhere; see ``Publisher``."""
        difference = await self._delivery.to_all(self._releases[version])
        self.newest = version
        self._retire_unused()
        return difference

    def address(self, version: int, anchor: int | None = None) -> Address:
        """The adapter's name. Asking for a version that was never published or is retired is a bug."""
        if version > self.newest or version not in self._releases:
            raise StalenessError(f"version {version} is not loaded; loaded are {sorted(self._releases)}")
        return Address(adapter=self._name(version), extra_key=f"v{version if anchor is None else anchor}")

    def hold(self, version: int) -> None:
        """Keep ``version`` loaded until it is released as often as it was held."""
        self._holders[version] += 1

    def release(self, version: int) -> None:
        """Undo one ``hold``."""
        self._holders[version] -= 1
        if self._holders[version] == 0:
            del self._holders[version]
            self._retire_unused()

    def _name(self, version: int) -> str:
        return f"{self._prefix}-v{version}"

    async def _install(self, server: ServerControl, release: Release, together: Round) -> float:
        """Load what the server lacks, check the newest, and sweep out what nobody will ask for again."""
        # Asking first, because the answer to an earlier load may have been lost after the server had done it.
        loaded = await server.adapters()
        for wanted in list(self._releases.values()):
            if wanted.version <= release.version and self._name(wanted.version) not in loaded:
                await self._carrier.load(server, self._name(wanted.version), wanted.version)
        adapter = self._name(release.version)
        difference = await self._staging.check(server, release, adapter=adapter)
        wanted_names = {self._name(version) for version in self._releases} | self._unloading
        for name in sorted(loaded - wanted_names):
            if self._ours.fullmatch(name):
                self._sampler.spawn(partial(self._unload, server, name))
        return difference

    def _retire_unused(self) -> None:
        published = sorted(version for version in self._releases if version <= self.newest)
        for version in published[:-_KEPT]:
            if version not in self._holders:
                self._sampler.spawn(partial(self._retire, self._releases.pop(version)))

    async def _retire(self, release: Release) -> None:
        name = self._name(release.version)
        kept: list[str] = []

        async def unload(server: ServerControl) -> None:
            if not await self._unload(server, name):
                kept.append(server.url)

        self._unloading.add(name)
        async with anyio.create_task_group() as tasks:
            for server in self._sampler.live:
                tasks.start_soon(unload, server)
        self._unloading.discard(name)
        if not kept:
            await self._staging.remove(release)

    async def _unload(self, server: ServerControl, name: str) -> bool:
        """True if ``server`` let go of the adapter. What it still has is tried again at the next installation."""
        try:
            with anyio.fail_after(self._sampler.timeouts.publication_s):
                try:
                    await server.unload_adapter(name)
                except RequestRefused:
                    # A sweep may meet what was unloaded since it looked.
                    if name in await server.adapters():
                        raise
        except (SamplingError, TimeoutError) as error:
            self._sampler.notice("adapter_not_unloaded", url=server.url, adapter=name, reason=repr(error))
            return False
        return True


def _payload(weights: Mapping[str, Any], by_handle: bool) -> tuple[object, str]:
    """The adapter as one bucket, and what a request says about it."""
    from asyncrl.publishing.torch_buckets import as_tensors, make_bucket, payload

    tensors = as_tensors(weights)
    # The widest types first, as in ``plan_buckets``; an adapter is small enough for one bucket.
    bucket = make_bucket(tensors, sorted(tensors, key=lambda name: -tensors[name].itemsize))
    return bucket, payload(bucket, by_handle=by_handle)
