"""Staging: a version as the learner holds it now, kept until no server needs it, and what the learner says about it.

Publishers to servers begin with this (``ServerPublisher``).
What is kept depends on how it will travel: ``Folders`` on disk, or ``Copies`` in memory.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import orjson

from asyncrl.errors import CheckpointError
from asyncrl.files import (
    check_folder,
    drafted,
    emptied,
    flush,
    numbered,
    remove,
    seal_folder,
    settle,
    sweep,
    version_folder,
)
from asyncrl.learning.base import Learner
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.control import ServerControl
from asyncrl.types import FloatArray

__all__ = ["Copies", "Folders", "ServerPublisher", "StagedVersion", "Staging", "Store"]

T = TypeVar("T")
_ABOUT = "about.json"
_REFERENCE = "probe.json"
# Beside the weights of a version: what the learner says about the probe tokens. Servers do not look at it.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedVersion:
    """A staged version."""

    version: int
    reference: FloatArray | None
    """(T - 1,) the learner's log-probabilities of the probe tokens; None if an earlier process has not left them."""


class Store(Protocol):
    """Keeps staged versions. Real: ``Folders``, ``Copies``."""

    kept: int
    """How many published versions a server may read while it gets the newest of them, that one included."""

    @property
    def damaged(self) -> Sequence[CheckpointError]:
        """What is wrong with versions that were to be adopted and are not."""
        ...

    async def adopt(self, versions: Iterable[int]) -> Mapping[int, FloatArray | None]:
        """Those of ``versions`` that an earlier process has left here, and what the learner said about the probe then.

        Its others are removed.
        """
        ...

    async def stage(self, version: int, reference: FloatArray | None = None) -> None:
        """Keep the learner's current parameters as ``version``; the learner may change them once this returns.

        ``reference``: what the learner says about the probe, kept with them where they outlive this process.
        """
        ...

    async def remove(self, version: int) -> None:
        """Forget a version that no server needs any more."""
        ...


class Folders:
    """Owns ``directory`` with one immutable folder for each version, ``v000012``. No file work on the event loop.

    ``own``: what an earlier process has left there is this run's, and is removed unless it is adopted.
    ``sealed``: folders tell when they are damaged (``files.py``), without which none is adopted. It takes a quarter of
    a second for each gigabyte.
    """

    kept = 2
    # A server that comes back gets the newest, and may still be reading the one before it.

    def __init__(self, learner: Learner, directory: Path, *, own: bool = False, sealed: bool = False) -> None:
        self.damaged: list[CheckpointError] = []
        self._sealed = sealed
        self._learner = learner
        self._directory = directory
        self._to_sweep = own
        # Two, so that removing an old folder does not delay writing a new one.
        self._limiter = anyio.CapacityLimiter(2)

    def folder(self, version: int) -> Path:
        """What the servers read."""
        return version_folder(self._directory, version)

    async def stage(self, version: int, reference: FloatArray | None = None) -> None:
        """Write the learner's current parameters, and ``reference``, into the folder of ``version``.

        The folder gets its name in one step when it is on disk, so that no server ever reads half a version. One that
        has this name already is left from a process that was killed before it could record the version: it is replaced.
        """
        if self._to_sweep:
            await self.adopt(())
        final = self.folder(version)
        partial = drafted(final)
        await self._off_loop(emptied, partial)
        await self._learner.export(partial)
        await self._off_loop(self._settle, partial, final, reference)

    async def adopt(self, versions: Iterable[int]) -> Mapping[int, FloatArray | None]:
        """Those of ``versions`` that are here whole; all other folders of versions are removed."""
        self._to_sweep = False
        return await self._off_loop(self._adopt, frozenset(versions))

    def _adopt(self, versions: frozenset[int]) -> dict[int, FloatArray | None]:
        found: dict[int, FloatArray | None] = {}
        if not self._directory.exists():
            return found
        sweep(self._directory)
        for version in numbered(self._directory, "v"):
            folder = self.folder(version)
            if version in versions and self._is_whole(folder):
                found[version] = _read_reference(folder / _REFERENCE)
            else:
                remove(folder)
        return found

    def _is_whole(self, folder: Path) -> bool:
        if self._sealed:
            try:
                check_folder(folder, _ABOUT)
            except CheckpointError as error:
                self.damaged.append(error)
                return False
        return True

    def _settle(self, partial: Path, final: Path, reference: FloatArray | None) -> None:
        if reference is not None:
            (partial / _REFERENCE).write_bytes(orjson.dumps(reference, option=orjson.OPT_SERIALIZE_NUMPY))
        if self._sealed:
            seal_folder(partial, _ABOUT, {})
        else:
            flush(partial)
        settle(partial, final)

    async def remove(self, version: int) -> None:
        """Remove the folder of ``version``."""
        await self._off_loop(shutil.rmtree, self.folder(version))

    async def _off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._limiter)


class Copies:
    """Copies of the parameters by version: the newest on the learner's device, older ones in the host's memory.

    So a GPU holds one copy beside the model, however many versions wait for a server.
    """

    kept = 1
    damaged = ()

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._weights: dict[int, dict[str, Any]] = {}
        self._limiter = anyio.CapacityLimiter(1)
        self.device: str | None = None
        """The GPU that they are sent from, which is the learner's."""

    def weights(self, version: int) -> Mapping[str, Any]:
        """Tensors under the names that servers load; see ``Learner.weights``. They may move while they are used."""
        return self._weights[version]

    async def adopt(self, versions: Iterable[int]) -> Mapping[int, FloatArray | None]:
        """Adopts no version: copies end with their process."""
        return {}

    async def stage(self, version: int, reference: FloatArray | None = None) -> None:
        """Copy the parameters, and move the copies of older versions off the GPU."""
        for older in list(self._weights.values()):
            if any(getattr(value, "is_cuda", False) for value in older.values()):
                await anyio.to_thread.run_sync(_to_host, older, limiter=self._limiter)
        staged = self._weights[version] = dict(await self._learner.weights())
        self.device = next((str(value.device) for value in staged.values() if getattr(value, "is_cuda", False)), None)

    async def remove(self, version: int) -> None:
        """Drop the copy of ``version``."""
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

    async def stage(self, version: int) -> StagedVersion:
        """Keep the current parameters; the learner may change them once this returns."""
        if self._probe is None:
            path = self._learner.model_path
            self._probe = await anyio.to_thread.run_sync(Probe.for_model, path, limiter=self._limiter)
        reference = await self._probe.reference(self._learner)
        await self._store.stage(version, reference)
        return StagedVersion(version=version, reference=reference)

    async def check(self, server: ServerControl, staged: StagedVersion, *, adapter: str | None = None) -> float:
        """Compare ``server`` with the learner as it was; see ``Probe.check``. 0 without a reference."""
        if self._probe is None or staged.reference is None:
            return 0.0
        return await self._probe.check(server, staged.reference, version=staged.version, adapter=adapter)

    async def remove(self, staged: StagedVersion) -> None:
        """Forget a version that no server needs any more."""
        await self._store.remove(staged.version)


class ServerPublisher:
    """What all publishers to servers share: the versions that are staged, and which of them trajectories have pinned.

    ``probe``: None makes one for the learner's model.
    """

    pins_versions = True

    def __init__(self, learner: Learner, fleet: ServerFleet, store: Store, probe: Probe | None) -> None:
        self.newest = -1
        """The newest published version; -1: none."""
        self._fleet = fleet
        self._staging = Staging(learner, store, probe)
        self._staged: dict[int, StagedVersion] = {}
        self._pins: Counter[int] = Counter()

    async def stage(self, version: int) -> None:
        """Keep the parameters as they are now, and note what the learner says about the probe."""
        self._staged[version] = await self._staging.stage(version)

    def pin(self, version: int) -> None:
        """Keep ``version`` until it is unpinned as often as it was pinned."""
        self._pins[version] += 1

    def unpin(self, version: int) -> None:
        """Undo one ``pin``; what nobody has pinned any more is given up."""
        self._pins[version] -= 1
        if self._pins[version] == 0:
            del self._pins[version]
            self._give_up_unused()

    def _give_up_unused(self) -> None:
        """Called when the last pin of a version has gone."""


def _to_host(weights: dict[str, Any]) -> None:
    """One after the other, so that no other copy is needed on the way."""
    for name, value in weights.items():
        weights[name] = value.cpu()


def _read_reference(file: Path) -> FloatArray | None:
    """What was said about the probe; None if nobody has written it."""
    try:
        values = np.array(orjson.loads(file.read_bytes()), dtype=np.float32)
    except (OSError, ValueError, TypeError):
        return None
    return values if values.ndim == 1 and len(values) else None
