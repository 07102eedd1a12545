"""``run.json``: which run a directory is of, and whether it has begun. Blocking: call from a worker thread.

The same file has the configuration, for people; that part is left as it is. Of what other files say about the run,
only the number of its last step is looked at here: a step that was told is not to be made again without a word.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.fingerprint import require_same
from asyncrl.errors import CheckpointError
from asyncrl.seals import read_json, write_json

__all__ = ["RunFile"]

_NAME = "run.json"
_WAY_OUT = "put back a copy of what is missing, or use another folder"


class RunFile:
    """Owns ``directory/run.json``, but for the configuration in it."""

    def __init__(self, directory: Path) -> None:
        self.steps_before: int | None = None
        """Of which length the run was to be so far; None if it is new."""
        self.run = uuid.uuid4().hex
        """Which run this is, by a name that no other has; of a directory with state, known once that was checked."""
        self._directory = directory
        self._path = directory / _NAME
        self._content: dict[str, Any] = {}

    def read(self) -> None:
        """Read what the file says. ``CheckpointError`` if it is damaged."""
        self._content = read_json(self._path) if self._path.exists() else {}
        self.run = self._content.get("run", self.run)

    @property
    def known(self) -> bool:
        """True if the file was there and said which run this is."""
        return "run" in self._content

    def check(self, plan: Mapping[str, Any], *, exists: bool) -> bool:
        """Compare ``plan`` with that of the run in the directory; ``exists``: there is state of one.

        False if there is none, and what is there of one that has done nothing is not of this run. Raises
        ``ConfigError`` with each difference, ``CheckpointError`` if what the file needs is missing.
        """
        if exists:
            if "plan" not in self._content:
                raise CheckpointError(
                    f"{self._path} is missing or does not say which run this is, but {self._directory} has the state "
                    f"of one: nobody can tell whether it is the same; {_WAY_OUT}"
                )
            require_same(self._content["plan"], plan, str(self._directory))
            self.steps_before = self._content["steps"]
            return True
        if self._content.get("begun"):
            raise CheckpointError(
                f"{self._path} is of a run that has committed steps, but there are none in state, weights and journal "
                f"beside it; {_WAY_OUT}"
            )
        return bool(self._content.get("plan") == plan)

    def require_told(self, n: int, told: tuple[Path, int] | None) -> None:
        """Raise ``CheckpointError`` if ``told``, a file and the last step in it, is after ``n``."""
        if told is not None and told[1] > n:
            path, step = told
            raise CheckpointError(
                f"{path} has step {step}, but state and journal beside it end with step {n}; {_WAY_OUT}; to make the "
                f"steps after {n} once more, move {path.name} away"
            )

    def write(self, plan: Mapping[str, Any], steps: int) -> None:
        """This is the run, and how long it is to be."""
        self._content |= {"run": self.run, "plan": plan, "steps": steps}
        write_json(self._path, self._content)

    def begin(self) -> None:
        """A step was committed."""
        if not self._content.get("begun"):
            self._content["begun"] = True
            write_json(self._path, self._content)
