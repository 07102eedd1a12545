"""Saved weights: what the learner needs to go on, in a sealed folder for each version. The newest is kept.

Blocking: call from a worker thread.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from asyncrl.errors import CheckpointError
from asyncrl.files import (
    check_folder,
    drafted,
    emptied,
    numbered,
    remove,
    require_own,
    seal_folder,
    settle,
    version_folder,
)

__all__ = ["SavedWeights"]

_ABOUT = "about.json"
_PREFIX = "v"


class SavedWeights:
    """Owns ``folder`` with ``v000020``, .."""

    def __init__(self, folder: Path) -> None:
        self.damage: CheckpointError | None = None
        """What is wrong with the newest weights, if older ones were found to do."""
        self._folder = folder

    def versions(self) -> list[int]:
        """The versions that are there, in order."""
        return numbered(self._folder, _PREFIX)

    def newest(self, n: int, journal: Collection[int], run: str | None = None) -> tuple[int, int, Path] | None:
        """Step, version and folder of the newest of ``run`` that is whole; None without any. Reads it all.

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
            self.damage = failure
            return about["n"], version, path
        if failure is not None:
            raise failure
        return None

    def draft(self, version: int) -> Path:
        """An empty folder for the learner's state at ``version``; it counts from ``commit`` on."""
        emptied(folder := drafted(self._path(version)))
        return folder

    def commit(self, *, n: int, version: int, run: str) -> None:
        """The draft of ``version`` is the state of ``run`` after step ``n``; all others are removed."""
        path = self._path(version)
        seal_folder(drafted(path), _ABOUT, {"n": n, "version": version, "run": run})
        settle(drafted(path), path)
        for other in self.versions():
            if other != version:
                remove(self._path(other))

    def clear(self) -> None:
        """Remove all saved weights."""
        for version in self.versions():
            remove(self._path(version))

    def _path(self, version: int) -> Path:
        return version_folder(self._folder, version)
