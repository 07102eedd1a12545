"""Staging: the learner's parameters of one version, complete on disk, and what the learner says about the probe."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from asyncrl.learning.base import Learner
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.control import ServerControl
from asyncrl.types import FloatArray

__all__ = ["Release", "Staging"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Release:
    """A staged version."""

    version: int
    folder: Path
    """What the servers read; never changed."""
    reference: FloatArray
    """(T - 1,) the learner's log-probabilities of the probe tokens."""


class Staging:
    """Owns ``directory`` with one folder for each version, ``v000012``. No file work happens on the event loop.

    ``probe``: None makes one for the learner's model.
    """

    def __init__(self, learner: Learner, directory: Path, probe: Probe | None) -> None:
        self._learner = learner
        self._directory = directory
        self._probe = probe
        # Two, so that removing an old folder does not delay writing a new one.
        self._limiter = anyio.CapacityLimiter(2)

    async def stage(self, version: int) -> Release:
        """Export the current parameters; the learner may change them once this returns.

        The folder gets its name in one step when it is on disk, so that no server ever reads half a version. One that
        has this name already is left from a process that was killed before it could record the version: it is replaced.
        """
        final = self._directory / f"v{version:06d}"
        partial = self._directory / f".{final.name}.partial"
        await anyio.to_thread.run_sync(_empty, partial, limiter=self._limiter)
        await self._learner.export(partial)
        await anyio.to_thread.run_sync(_settle, partial, final, limiter=self._limiter)
        if self._probe is None:
            path = self._learner.model_path
            self._probe = await anyio.to_thread.run_sync(Probe.for_model, path, limiter=self._limiter)
        return Release(version=version, folder=final, reference=await self._probe.reference(self._learner))

    async def check(self, server: ServerControl, release: Release, *, adapter: str | None = None) -> float:
        """Compare ``server`` with the learner as it was; see ``Probe.check``."""
        assert self._probe is not None, "a release exists, so it was staged"
        return await self._probe.check(server, release.reference, version=release.version, adapter=adapter)

    async def remove(self, release: Release) -> None:
        """Remove the folder of a version that no server reads any more."""
        await anyio.to_thread.run_sync(shutil.rmtree, release.folder, limiter=self._limiter)


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
