"""The folder that a run writes its versions to, and whose they are when the run is resumed."""

from __future__ import annotations

import hashlib
import re
import tempfile
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from asyncrl.files import locked, reading, write
from asyncrl.sampling.labels import Writer

__all__ = ["Home", "run_of"]

_RUN = "run-id"
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a run writes its versions, and whose they are."""

    directory: Path
    is_temporary: bool
    """True if nobody wants the newest version left there as the result."""
    own: bool
    """True if what an earlier process has left there is this run's."""
    writer: Writer

    @classmethod
    def taken(cls, stack: AsyncExitStack, directory: Path | None, versions_in: Path | None) -> Home:
        """``directory``, or else ``versions_in``, or else a temporary folder, for one run until ``stack`` ends. Blocks.

        Whoever uses ``versions_in`` again is the same run, resumed. Raises ``ConfigError`` if another run writes there.
        """
        resumed_in = None if versions_in is None else versions_in.resolve()
        found = directory or resumed_in
        if found is None:
            temporary = tempfile.TemporaryDirectory(prefix="asyncrl-")
            stack.callback(temporary.cleanup)
        else:
            # Servers read its folders by name: another run in it would give its weights to our servers.
            stack.enter_context(locked(found, "policy.directory"))
        return cls(
            directory=Path(temporary.name) if found is None else found,
            is_temporary=found is None,
            own=resumed_in is not None and found == resumed_in,
            writer=Writer() if resumed_in is None else Writer(run=run_of(resumed_in)),
        )


def run_of(directory: Path) -> str:
    """Eight hexadecimal digits for the run that is resumed from ``directory``; made the first time.

    A copy of the folder in another place is another run: both may go on at the same time.
    """
    file = directory / _RUN
    known = ""
    if file.exists():
        with reading(file):
            known = file.read_text(errors="replace").strip()
    if not _ID.fullmatch(known):
        directory.mkdir(parents=True, exist_ok=True)
        known = uuid.uuid4().hex
        write(file, [f"{known}\n".encode()])
    return hashlib.blake2b(f"{known}\n{directory.resolve()}".encode(), digest_size=4).hexdigest()
