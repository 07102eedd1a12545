"""Batches that train nothing: counted, explained, and at last the end of a run that learns nothing.

A batch makes no version if none of its tokens gets a gradient: every member was dropped, or each has the reward of its
whole group. A few such batches in a row are usual where rewards are rare. So there is a warning after five, which says
what became of the members, and an error after ``failures.untrained_batches``. A batch that makes a version begins the
count anew. The next warning needs a row twice as long as the last one, so that a slow start is no stream of warnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import anyio

from asyncrl.errors import NothingTrained
from asyncrl.events import Events, Notice
from asyncrl.types import DropReason, Group, SpanKind, Trajectory

__all__ = ["Untrained", "fates"]

_WARNED_AFTER = 5


class Untrained:
    """Owns the count of batches in a row without a version.

    ``most`` of them end the run, 0: never. ``oldest_age``: spans beyond it are masked, None: none is. ``batches`` were
    counted by an earlier process; if they had ended the run, whoever resumes it has changed something, and begins anew.
    """

    def __init__(self, events: Events, *, most: int, oldest_age: int | None, batches: int = 0) -> None:
        self.batches = batches if not most or batches < most else 0
        self._events = events
        self._most = most
        self._oldest_age = oldest_age
        self._fates: Counter[str] = Counter()
        self._explained = 0
        # Batches of the row whose members are in ``_fates``.
        self._next_warning = _WARNED_AFTER
        self._warned = False

    def add(self, groups: Sequence[Group], *, version: int, made_version: bool) -> None:
        """A batch of ``groups`` was trained at ``version``, or was to be."""
        if made_version:
            self.batches = self._explained = 0
            self._fates.clear()
            return
        self.batches += 1
        self._explained += 1
        oldest = None if self._oldest_age is None else version - self._oldest_age
        for group in groups:
            self._fates.update(fates(group, oldest=oldest))
        if self.batches >= self._next_warning:
            self._next_warning = 2 * self.batches
            self._warn()

    def require_some(self) -> None:
        """Raise ``NothingTrained`` if that were too many."""
        if self._most and self.batches >= self._most:
            raise NothingTrained(
                f"{self.batches} batches in a row made no version: {self._causes()}. Mend that, or set "
                f"failures.untrained_batches, which is {self._most} (0: never end for this)"
            )

    def end(self, version: int) -> None:
        """The run ended at ``version``: warn if it has made none, however short it was."""
        if version == 0 and self.batches and not self._warned:
            self._warn()

    def _warn(self) -> None:
        self._warned = True
        keys = {"batches": self.batches, "causes": self._causes(), "ends_after": self._most}
        self._events.emit(Notice(time=anyio.current_time(), name="nothing_trained", level="warning", keys=keys))

    def _causes(self) -> str:
        causes = ", ".join(f"{count} {fate}" for fate, count in self._fates.most_common())
        return f"of {self._fates.total()} members in the last {self._explained}, {causes or 'there was none'}"


def fates(group: Group, *, oldest: int | None) -> Iterator[str]:
    """For each member of a batch without gradient, why it has none; spans of versions before ``oldest`` are masked."""
    rewards = {member.reward for member in group.members_G if member.is_trained}
    for member in group.members_G:
        if member.dropped is DropReason.TRUNCATED:
            yield f"were truncated by {member.truncated} and dropped (truncation)"
        elif member.dropped is not None:
            yield f"were dropped: {member.dropped}"
        elif not member.generated_tokens:
            yield "have no token"
        elif oldest is not None and not _is_young(member, oldest):
            yield "are masked: older than max_staleness"
        elif len(rewards) == 1:
            yield f"have the reward of their whole group ({member.reward:g})"
        else:
            yield "have advantage 0"


def _is_young(member: Trajectory, oldest: int) -> bool:
    return any(
        span.kind is SpanKind.GENERATED and span.version is not None and span.version >= oldest for span in member.spans
    )
