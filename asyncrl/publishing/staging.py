"""Staging: a version as the learner holds it now, kept until no server needs it, and what the learner says about it.

What is kept depends on how it will travel: ``Folders`` on disk, or ``Copies`` in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from asyncrl.learning.base import Learner
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.control import ServerControl
from asyncrl.types import FloatArray

__all__ = ["Copies", "Folders", "Release", "Staging", "Store"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Release:
    """A staged version."""

    version: int
    reference: FloatArray
    """(T - 1,) the learner's log-probabilities of the probe tokens."""


class Store(Protocol):
    """Keeps staged versions. Real: ``Folders``, ``Copies``."""

    async def stage(self, version: int) -> None:
        """Keep the learner's current parameters as ``version``; the learner may change them once this returns."""
        ...

    async def remove(self, version: int) -> None:
        """Forget a version that no server needs any more."""
        ...


class Folders:
    """Owns ``directory`` with one immutable folder for each version, ``v000012``. No file work on the event loop."""

    def __init__(self, learner: Learner, directory: Path) -> None:
        self._learner = learner
        self._directory = directory
        # Two, so that removing an old folder does not delay writing a new one.
        self._limiter = anyio.CapacityLimiter(2)

    def folder(self, version: int) -> Path:
        """What the servers read."""
        return self._directory / f"v{version:06d}"

    async def stage(self, version: int) -> None:
        """See ``Store``.

        The folder gets its name in one step when it is on disk, so that no server ever reads half a version. One that
        has this name already is left from a process that was killed before it could record the version: it is replaced.
        """
        final = self.folder(version)
        partial = self._directory / f".{final.name}.partial"
        await anyio.to_thread.run_sync(_empty, partial, limiter=self._limiter)
        await self._learner.export(partial)
        await anyio.to_thread.run_sync(_settle, partial, final, limiter=self._limiter)

    async def adopt(self, versions: Iterable[int]) -> frozenset[int]:
        """Those of ``versions`` that an earlier process has left here; its others are removed."""
        return await anyio.to_thread.run_sync(self._adopt, frozenset(versions), limiter=self._limiter)

    def _adopt(self, versions: frozenset[int]) -> frozenset[int]:
        found = set()
        for folder in self._directory.glob("v[0-9]*"):
            version = int(folder.name[1:])
            if version in versions:
                found.add(version)
            else:
                shutil.rmtree(folder)
        return frozenset(found)

    async def remove(self, version: int) -> None:
        """See ``Store``."""
        await anyio.to_thread.run_sync(shutil.rmtree, self.folder(version), limiter=self._limiter)


class Copies:
    """Copies of the parameters by version, on the learner's device."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._weights: dict[int, Mapping[str, Any]] = {}

    def weights(self, version: int) -> Mapping[str, Any]:
        """Tensors under the names that servers load; see ``Learner.weights``."""
        return self._weights[version]

    async def stage(self, version: int) -> None:
        """See ``Store``."""
        self._weights[version] = await self._learner.weights()

    async def remove(self, version: int) -> None:
        """See ``Store``."""
        del self._weights[version]


class Staging:
    """Stages versions in ``store``, each with what the learner says about the probe.

    ``probe``: None makes one for the learner's model.
    """

    def __init__(self, learner: Learner, store: Store, probe: Probe | None) -> None:
        self._learner = learner
        self._store = store
        self._probe = probe
        self._limiter = anyio.CapacityLimiter(1)

    async def stage(self, version: int) -> Release:
        """Keep the current parameters; the learner may change them once this returns."""
        await self._store.stage(version)
        if self._probe is None:
            path = self._learner.model_path
            self._probe = await anyio.to_thread.run_sync(Probe.for_model, path, limiter=self._limiter)
        return Release(version=version, reference=await self._probe.reference(self._learner))

    async def check(self, server: ServerControl, release: Release, *, adapter: str | None = None) -> float:
        """Compare ``server`` with the learner as it was; see ``Probe.check``."""
        assert self._probe is not None, "a release exists, so it was staged"
        return await self._probe.check(server, release.reference, version=release.version, adapter=adapter)

    async def remove(self, release: Release) -> None:
        """Forget a version that no server needs any more."""
        await self._store.remove(release.version)


def _empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _settle(partial: Path, final: Path) -> None:
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
