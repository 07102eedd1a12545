"""Failures for people: one line for each kind, and then how many more of it there were."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from asyncrl.events import Event, GroupDropped, GroupRerolled, MemberFailed, StepFinished, ToolFailed

__all__ = ["Repeats"]

_KINDS = 1000
# That are remembered; errors of servers may differ in each text.
_Failure: TypeAlias = MemberFailed | GroupRerolled | GroupDropped | ToolFailed
_NAMES: Mapping[type[Event], str] = {
    MemberFailed: "member_failed",
    GroupRerolled: "group_rerolled",
    GroupDropped: "group_dropped",
    ToolFailed: "tool_failed",
}


@dataclass(slots=True)
class _Kind:
    """Failures of one kind that there were, and those of them that nobody has been told of."""

    name: str
    keys: Mapping[str, object]
    times: int = 1
    untold: int = 0


class Repeats:
    """Owns the count of failures by kind: the same error at the same line of the user's code, or with the same text.

    ``tell(name, keys)`` writes a line: for the first of a kind, for the tenth, the hundredth and so on, and at the end
    of each step for what came since. ``end`` tells the rest.
    """

    def __init__(self, tell: Callable[[str, Mapping[str, object]], None]) -> None:
        self._tell = tell
        self._kinds: dict[tuple[str, str, str], _Kind] = {}

    def observe(self, event: Event) -> None:
        """Count ``event`` if it is a failure; at the end of a step tell of those before it."""
        match event:
            case MemberFailed() | GroupRerolled() | GroupDropped() | ToolFailed():
                self._count(event)
            case StepFinished():
                self.end()

    def end(self) -> None:
        """Tell of what nobody has been told yet."""
        for kind in self._kinds.values():
            self._tell_more(kind)

    def _count(self, event: _Failure) -> None:
        name, where = _NAMES[type(event)], {"where": event.where} if event.where else {}
        alike = event.error.partition(":")[0] if where else event.error
        kind = self._kinds.get((name, alike, event.where))
        if kind is None:
            if len(self._kinds) == _KINDS:
                self._tell_more(self._kinds.pop(next(iter(self._kinds))))
            # What its member has said a group does not say again.
            member = "member_failed", alike, event.where
            said = isinstance(event, GroupRerolled | GroupDropped) and member in self._kinds
            self._kinds[name, alike, event.where] = _Kind(name, {"error": alike, **where})
            self._tell(name, {**_who(event), "error": alike if said else event.error, **where})
            return
        kind.times += 1
        kind.untold += 1
        if kind.times == 10 ** round(math.log10(kind.times)):
            self._tell_more(kind)

    def _tell_more(self, kind: _Kind) -> None:
        if kind.untold:
            self._tell(kind.name, {"more": kind.untold, **kind.keys})
            kind.untold = 0


def _who(event: _Failure) -> dict[str, object]:
    match event:
        case MemberFailed():
            return {"group": event.group, "member": event.member, "attempt": event.attempt}
        case ToolFailed():
            return {"tool": event.tool, "group": event.group, "member": event.member}
        case GroupDropped():
            return {"group": event.group, "reason": event.reason}
        case _:
            return {"group": event.group}
