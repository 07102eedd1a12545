"""A run directory: which files are in it, and how they make the state of its run. Blocking: call from worker threads.

``run.json`` says which run it is of and whether that has begun; its configuration is for people. Of what other files
say about the run, only the number of its last step is looked at: a step that was logged is not to be made again without
a word.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.fingerprint import require_same
from asyncrl.checkpoint.journal import Journal
from asyncrl.checkpoint.snapshots import Snapshots
from asyncrl.checkpoint.state import RunState
from asyncrl.checkpoint.weights import SavedWeights
from asyncrl.errors import CheckpointError
from asyncrl.files import read_json, reading, sweep, write_json
from asyncrl.types import Row

__all__ = ["RunDirectory", "read_origin", "write_configuration"]

_RUN_FILE = "run.json"
_WAY_OUT = "put back a copy of what is missing, or use another folder"
_LIBRARIES = ("asyncrl", "torch", "transformers", "peft", "anyio", "httpx")


class RunDirectory:
    """Owns ``path``, which this process has locked. ``read`` it first; then ``state`` is where the run goes on.

    The journal may be written in one thread while another one does everything else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = uuid.uuid4().hex
        """Which run this is, by a name that no other has; of a directory with state, known once that was checked."""
        self.steps_before: int | None = None
        """Of which length the run was to be so far; None if it is new."""
        self.state = RunState()
        """As it was found; empty for a new run."""
        self.evaluated = -1
        """The newest step after which the policy was measured; -1 if it never was."""
        self.journal = Journal(path / "journal", path / "refused")
        self.weights = SavedWeights(path / "weights")
        self._snapshots = Snapshots(path / "state")
        self._run_file = path / _RUN_FILE
        self._evaluated_file = path / "state" / "evaluated.json"
        self._content: dict[str, Any] = {}
        # Of the run file.

    def read(
        self, identity: Mapping[str, Any], row: Callable[[int], Row], steps: int, logged: tuple[Path, int] | None
    ) -> None:
        """Read the state of the run that ``identity`` describes, and which is to have so many ``steps``.

        ``row(index)`` is that of a group. ``logged``: a file for other programs, and the last step in it.
        Raises ``ConfigError`` with each difference if the state is of another run, ``CheckpointError`` if something
        that it needs is missing or damaged.
        """
        for name in ("state", "weights", "journal"):
            with reading(self.path / name):
                (self.path / name).mkdir(exist_ok=True)
                sweep(self.path / name)
        entries = self.journal.steps()
        weights = self.weights.versions()
        self._content = read_json(self._run_file) if self._run_file.exists() else {}
        self.run = self._content.get("run", self.run)
        # Without its file nothing says which run the state is of, and that is refused.
        state = self._snapshots.read(row, self._content.get("run"))
        if state is not None or entries or any(weights):
            self._require_same(identity)
        else:
            self._require_unbegun()
            if self._content.get("plan") != identity:
                # An adapter that nothing was done with, of another run or of nobody knows which.
                self.weights.clear()
        self.state = state or RunState()
        for n in entries:
            if n > self.state.n:
                self._apply(n)
        self._require_logged(logged)
        if self._evaluated_file.exists():
            self.evaluated = read_json(self._evaluated_file)["n"]
        self._content |= {"run": self.run, "plan": identity, "steps": steps}
        write_json(self._run_file, self._content)

    @property
    def damaged(self) -> Mapping[str, CheckpointError]:
        """What is damaged and was not needed, as there was something older: the name of its notice -> the error."""
        found = {"snapshot_damaged": self._snapshots.damage, "weights_damaged": self.weights.damage}
        return {name: error for name, error in found.items() if error is not None}

    def commit(self, n: int) -> None:
        """The drafted step of the journal has happened."""
        self.journal.commit(n)
        if not self._content.get("begun"):
            self._content["begun"] = True
            write_json(self._run_file, self._content)

    def save(self, state: RunState, *, weights_step: int) -> None:
        """Save ``state``. Steps before it and before ``weights_step``, that of the newest weights, are forgotten."""
        oldest = self._snapshots.write(replace(state, run=self.run))
        self.journal.forget(min(oldest, weights_step))

    def note_evaluated(self, n: int) -> None:
        """The policy after step ``n`` was measured."""
        self.evaluated = n
        write_json(self._evaluated_file, {"n": n})

    def close(self) -> None:
        """End the file that is being written."""
        self._snapshots.close()

    def _require_same(self, identity: Mapping[str, Any]) -> None:
        if "plan" not in self._content:
            raise CheckpointError(
                f"{self._run_file} is missing or does not say which run this is, but {self.path} has the state "
                f"of one: nobody can tell whether it is the same; {_WAY_OUT}"
            )
        require_same(self._content["plan"], identity, str(self.path))
        self.steps_before = self._content["steps"]

    def _require_unbegun(self) -> None:
        if self._content.get("begun"):
            raise CheckpointError(
                f"{self._run_file} is of a run that has committed steps, but there are none in state, weights and "
                f"journal beside it; {_WAY_OUT}"
            )

    def _require_logged(self, logged: tuple[Path, int] | None) -> None:
        if logged is not None and logged[1] > self.state.n:
            path, step = logged
            raise CheckpointError(
                f"{path} has step {step}, but state and journal beside it end with step {self.state.n}; {_WAY_OUT}; "
                f"to make the steps after {self.state.n} once more, move {path.name} away"
            )

    def _apply(self, n: int) -> None:
        path = self.journal.path(n)
        if n != self.state.n + 1:
            missing = self.journal.path(self.state.n + 1)
            raise self._snapshots.damage or CheckpointError(
                f"{missing} is missing, {path.name} is there, and no snapshot of step {n - 1} in state; {_WAY_OUT}"
            )
        try:
            self.state.apply(self.journal.read(n, sequences=False, run=self.run))
        except (KeyError, IndexError, TypeError) as error:
            raise CheckpointError(f"{path} does not go on from the state that was saved: {error!r}") from error


def read_origin(directory: Path) -> tuple[Path | None, Sequence[str]]:
    """The recipe or script that the run in ``directory`` was started from, and what ``--set`` said; None: not known.

    Raises ``CheckpointError`` if the run's file cannot be read.
    """
    origin = read_json(directory / _RUN_FILE).get("origin") or {}
    path = origin.get("path")
    return None if path is None else Path(path), origin.get("overrides", ())


def write_configuration(
    directory: Path, configuration: Mapping[str, object], *, origin: Path | None = None, overrides: Sequence[str] = ()
) -> None:
    """Begin the file of a new run, whole or not at all.

    It has the configuration, the recipe or script ``origin`` that it is from with its ``overrides``, when the run
    started and with which versions of what.
    """
    content = {
        "origin": {"path": None if origin is None else str(origin.resolve()), "overrides": list(overrides)},
        "configuration": configuration,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
    }
    write_json(directory / _RUN_FILE, content)
