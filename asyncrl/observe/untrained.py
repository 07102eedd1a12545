"""Batches that train nothing: counted, explained, and at last the end of a run that learns nothing.

A batch makes no version if none of its tokens gets a gradient: every member was dropped, or each has the reward of its
whole group. A few such batches in a row are usual where rewards are rare. So there is a warning after five, which says
what became of the members, and an error after ``failures.untrained_batches``. A batch that makes a version begins the
count anew. The next warning needs a row twice as long as the last one, so that a slow start is no stream of warnings.
A run that comes to its end without any version has failed, however short it was; one that made very few says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import anyio

from asyncrl.errors import NothingTrained
from asyncrl.events import Events, Notice
from asyncrl.rollout.usercode import place_of
from asyncrl.types import DropReason, Group, SpanKind, Trajectory

__all__ = ["Untrained", "fates"]

_WARNED_AFTER = 5
_FEW = 0.2
# Of the steps; a run that makes fewer versions says so at its end.
_CAUSES = 4
# Of the many that one message names: rewards may differ in each group.
_ADVICE = {
    "were truncated": "let conversations end in their budget (a larger [budget], a shorter prompt), or rate them in "
    "on_truncated and train them (trainer.truncation)",
    "were dropped": "mend what failed",
    "are masked": "set a larger trainer.max_staleness, or stale_policy = 'wait'",
    "have the reward": "look at what the model wrote (asyncrl show); let reward tell better from worse answers, give "
    "part of it for parts of the task, or set a larger trainer.group_size or rollout.temperature",
    "have advantage": "look at trainer.advantage: rewards differ, and it sees no difference",
}


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
        self._steps = self._made = 0
        # Of this process.
        self._tool_calls = self._tool_errors = 0.0
        self._tool_failure = ""
        # The first one.
        self._error: BaseException | None = None
        # Of the first member that failed.

    def add(self, groups: Sequence[Group], *, version: int, made_version: bool) -> None:
        """A batch of ``groups`` was trained at ``version``, or was to be."""
        self._steps += 1
        if made_version:
            self._made += 1
            self.batches = self._explained = 0
            self._tool_calls = self._tool_errors = 0.0
            self._tool_failure, self._error = "", None
            self._fates.clear()
            return
        self.batches += 1
        self._explained += 1
        oldest = None if self._oldest_age is None else version - self._oldest_age
        for group in groups:
            self._fates.update(fates(group, oldest=oldest))
            for member in group.members_G:
                self._error = self._error or member.error
                self._tool_calls += member.metrics.get("tool_calls", 0.0)
                self._tool_errors += member.metrics.get("tool_errors", 0.0)
                for tool, error, where in member.tool_failures[:1]:
                    self._tool_failure = self._tool_failure or f"tool {tool!r} raised {error} at {where}"
        if self.batches >= self._next_warning:
            self._next_warning = 2 * self.batches
            self._warn("nothing_trained", batches=self.batches, ends_after=self._most)

    def require_some(self) -> None:
        """Raise ``NothingTrained`` if that were too many."""
        if self._most and self.batches >= self._most:
            raise NothingTrained(
                f"{self.batches} batches in a row made no version: {self._causes()}.\nWhat to do: {self._advice()}; "
                f"or set failures.untrained_batches, which is {self._most} (0: never end for this)"
            ) from self._error

    def end(self, n: int, version: int, dropped: BaseException | None = None) -> None:
        """The run ended with step ``n`` at ``version``. Raises ``NothingTrained`` if it has made none.

        ``dropped``: why the first group was dropped, if one was. If the count cannot end a run, this is a warning.
        """
        if not n:
            return
        if version == 0 and self._most:
            raise NothingTrained(
                f"the run has ended, and none of its {n} steps made a version: {self._causes()}.\n"
                f"What to do: {self._advice()}"
            ) from self._error or dropped
        if version == 0:
            self._warn("nothing_trained", batches=self.batches, ends_after=self._most)
        elif self._made < _FEW * self._steps:
            self._warn("hardly_anything_trained", steps=self._steps, versions=self._made)

    def _warn(self, name: str, **keys: object) -> None:
        keys |= {"causes": self._causes(), "advice": self._advice()}
        self._events.emit(Notice(time=anyio.current_time(), name=name, level="warning", keys=keys))

    def _causes(self) -> str:
        if not self._explained:
            return "the last step made one" if self._made else "they were made by an earlier process"
        causes = [f"{count} {fate}" for fate, count in self._fates.most_common(_CAUSES)]
        rest = self._fates.total() - sum(count for _, count in self._fates.most_common(_CAUSES))
        causes += [f"{rest} others likewise"] if rest else []
        if self._tools_fail:
            causes.append(f"and {self._tool_errors:.0f} of their {self._tool_calls:.0f} tool calls failed")
        batches = "batch" if self._explained == 1 else f"{self._explained} batches"
        return f"of {self._fates.total()} members in the last {batches}, {', '.join(causes) or 'there was none'}"

    @property
    def _tools_fail(self) -> bool:
        # Some errors are the tool's answer to a model that does not know better.
        return 0 < self._tool_calls <= self._tool_errors

    def _advice(self) -> str:
        """What to do about the most frequent cause."""
        if self._tools_fail and self._tool_failure:
            return f"mend what fails first: {self._tool_failure}"
        fate = next(iter(self._fates.most_common(1)), ("", 0))[0]
        return next((advice for begin, advice in _ADVICE.items() if fate.startswith(begin)), "look at events.jsonl")


def fates(group: Group, *, oldest: int | None) -> Iterator[str]:
    """For each member of a batch without gradient, why it has none; spans of versions before ``oldest`` are masked."""
    rewards = {member.reward for member in group.members_G if member.is_trained}
    for member in group.members_G:
        if member.dropped is DropReason.TRUNCATED:
            yield f"were truncated by {member.truncated} and dropped (truncation)"
        elif member.error is not None:
            place = place_of(member.error)
            yield f"were dropped: failed ({type(member.error).__name__}{place and f' at {place}'})"
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
