"""Saved weights: what the learner needs to go on, in a folder for each version that was saved. The newest is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import orjson

from asyncrl.checkpoint.files import drafted, remove, settle, sync
from asyncrl.learning.base import Learner

__all__ = ["SavedWeights"]

T = TypeVar("T")
_ABOUT = "about.json"


class SavedWeights:
    """Owns ``folder`` with ``v000020``, ..; ``off_loop`` runs file work in a thread."""

    def __init__(self, folder: Path, off_loop: Callable[[Callable[[], object]], Awaitable[None]]) -> None:
        self._folder = folder
        self._off_loop = off_loop

    def newest(self) -> tuple[int, int, Path] | None:
        """Step, version and folder of the newest; None without any. Blocking."""
        folders = sorted(self._folder.glob("v[0-9]*"))
        if not folders:
            return None
        about = orjson.loads((folders[-1] / _ABOUT).read_bytes())
        return about["n"], about["version"], folders[-1]

    async def save(self, learner: Learner, *, n: int, version: int) -> None:
        """Save the learner as it is: after step ``n``, at ``version``."""
        path = self._folder / f"v{version:06d}"
        temporary = drafted(path)
        await self._off_loop(lambda: _empty(temporary))
        await learner.save_state(temporary)
        await self._off_loop(lambda: self._settle(temporary, path, {"n": n, "version": version}))

    def _settle(self, temporary: Path, path: Path, about: dict[str, int]) -> None:
        (temporary / _ABOUT).write_bytes(orjson.dumps(about))
        for file in [*temporary.rglob("*"), temporary]:
            sync(file)
        if path.exists():
            remove(path)
        settle(temporary, path)
        for older in self._folder.glob("v[0-9]*"):
            if older != path:
                remove(older)


def _empty(folder: Path) -> None:
    if folder.exists():
        remove(folder)
    folder.mkdir(parents=True)
