"""Saved weights: what the learner needs to go on, in a sealed folder for each version. The newest is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

from asyncrl.errors import CheckpointError
from asyncrl.files import check_folder, drafted, emptied, numbered, remove, require_own, seal_folder, settle
from asyncrl.learning.base import Learner

__all__ = ["SavedWeights"]

_ABOUT = "about.json"
_PREFIX = "v"


class SavedWeights:
    """Owns ``folder`` with ``v000020``, ..; ``off_loop`` runs file work in a thread."""

    def __init__(self, folder: Path, off_loop: Callable[[Callable[[], object]], Awaitable[None]]) -> None:
        self.passed_over: CheckpointError | None = None
        """What is wrong with the newest weights, if older ones were found to do."""
        self._folder = folder
        self._off_loop = off_loop

    def versions(self) -> list[int]:
        """The versions that are there, in order. Blocking."""
        return numbered(self._folder, _PREFIX)

    def newest(self, n: int, journal: Collection[int], run: str | None = None) -> tuple[int, int, Path] | None:
        """Step, version and folder of the newest of ``run`` that is whole; None without any. Blocking: reads it all.

        ``CheckpointError`` if a newer one is damaged and the ``journal`` does not have all steps from there to ``n``.
        """
        failure: CheckpointError | None = None
        for version in reversed(self.versions()):
            path = self._path(version)
            try:
                about = check_folder(path, _ABOUT)
                require_own(path / _ABOUT, about["run"], run)
                if about["version"] != version:
                    raise CheckpointError(f"{path} has the weights of version {about['version']}")
            except CheckpointError as error:
                failure = failure or error
                continue
            if failure is not None and not set(journal) >= set(range(about["n"] + 1, n + 1)):
                break
            self.passed_over = failure
            return about["n"], version, path
        if failure is not None:
            raise failure
        return None

    async def save(self, learner: Learner, *, n: int, version: int, run: str = "") -> None:
        """Save the learner of ``run`` as it is: after step ``n``, at ``version``."""
        path = self._path(version)
        temporary = drafted(path)
        await self._off_loop(lambda: emptied(temporary))
        await learner.save_state(temporary)
        await self._off_loop(lambda: self._settle(temporary, path, {"n": n, "version": version, "run": run}))

    def clear(self) -> None:
        """Forget all. Blocking."""
        for version in self.versions():
            remove(self._path(version))

    def _path(self, version: int) -> Path:
        return self._folder / f"{_PREFIX}{version:06d}"

    def _settle(self, temporary: Path, path: Path, about: Mapping[str, object]) -> None:
        seal_folder(temporary, _ABOUT, about)
        if path.exists():
            remove(path)
        settle(temporary, path)
        for version in self.versions():
            if self._path(version) != path:
                remove(self._path(version))
