"""What a check finds: for each part whether it is right, what is wrong with it, and what to do about that."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from asyncrl.errors import AsyncRLError
from asyncrl.plain import error_text, shortened
from asyncrl.rollout.usercode import folded_traceback, place_of

__all__ = ["Finding", "Findings", "Verdict"]

Verdict: TypeAlias = Literal["ok", "warning", "wrong", "not checked"]
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Differs from object to object.
_TEXT, _LINES = 800, 9
# Characters of an error and lines of its traceback: a finding fits on a screen.


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One part, and what was found of it."""

    verdict: Verdict
    part: str
    text: str
    trace: tuple[str, ...] = ()
    """The user's lines that an error came through."""
    todo: str = ""


@dataclass(slots=True)
class Findings:
    """Tells each finding to ``show`` when it is made, and the same one once. ``wrong`` counts the faults."""

    show: Callable[[Finding], None]
    wrong: int = 0
    _told: set[tuple[str, str]] = field(default_factory=set)

    def ok(self, part: str, text: str) -> None:
        """All is well with ``part``."""
        self._tell(Finding(verdict="ok", part=part, text=text))

    def warn(self, part: str, text: str, *, todo: str = "") -> None:
        """A run would work, but perhaps not as was meant."""
        self._tell(Finding(verdict="warning", part=part, text=text, todo=todo))

    def unchecked(self, part: str, text: str) -> None:
        """Nobody has looked at this."""
        self._tell(Finding(verdict="not checked", part=part, text=text))

    def fault(self, part: str, text: str, *, todo: str = "") -> None:
        """A run would be refused, or fail."""
        self._tell(Finding(verdict="wrong", part=part, text=text, todo=todo))

    def error(self, part: str, error: BaseException, *, todo: str = "", harmless: bool = False) -> None:
        """Something was raised: what, and where in the user's code. ``harmless``: that is a warning only."""
        said = str(error) if isinstance(error, AsyncRLError) and str(error) else error_text(error)
        place = place_of(error)
        trace = folded_traceback(error).splitlines()
        if len(trace) > _LINES:
            trace = ["  [and more above]", *trace[-_LINES:]]
        self._tell(
            Finding(
                verdict="warning" if harmless else "wrong",
                part=part,
                text=shortened(said, _TEXT) + (f" ({place})" if place and place not in said else ""),
                trace=tuple(trace),
                todo=todo,
            )
        )

    def _tell(self, finding: Finding) -> None:
        said = (finding.part, _ADDRESS.sub("", finding.text))
        if said in self._told:
            return
        self._told.add(said)
        self.wrong += finding.verdict == "wrong"
        self.show(finding)
