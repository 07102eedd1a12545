"""What becomes of failures: how often members and groups are tried again, and when a run has had enough of them.

A *member* fails when its machinery does (``EnvironmentFailure``, a deadline, ``SamplingError``), when a server refuses
its request for good (``RequestRefused``), or when user code raises. The first kind is tried again with a fresh
environment; a member that fails for good takes its *group* along, because a group without its failures would be biased
to what does not fail. The group is rolled out anew, and then dropped: its row is recorded as dropped with the cause,
and another one takes its place. The other two kinds are answers and no accidents: they are not tried again, and drop
their member only. To throw its siblings away would cost their tokens and cure nothing, for drawing until no member is
refused is the same selection. A group without any member left is dropped; one with fewer than
``completion.min_members`` rewards is compared with its batch, as always.

Failures *in a row* end the run, with the first error of the row. One outage fails everything that is in flight and is
one failure: only attempts that began after the last counted failure are counted. So a run with thousands of
trajectories in flight is not ended by a sandbox that restarts, and a broken environment ends it after ``consecutive``
attempts' time. Each time that a member ends well, the count starts again.

That does not end a run in which ``reward`` always raises and other members end well, because they are truncated. So
each function of the environment is counted by itself, over a step: if it fails for most members that call it, several
steps in a row, the run ends with its first error. An error now and then, or a few bad rows, never do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.errors import ConfigError, EnvironmentFailure, InvalidValue, RequestRefused, SamplingError, require_count

__all__ = ["FailureBudget", "Failures", "is_accident"]

_LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How many failures are survived; see above for what is one."""

    member_retries: int = 1
    """Further attempts of a member whose machinery failed, each with a fresh environment."""
    group_rerolls: int = 1
    """Fresh starts of a group of which a member failed for good. After that the group is dropped."""
    consecutive: int = 8
    """Failed attempts in a row, or dropped groups in a row, that end the run."""
    per_run: int | None = None
    """Failed attempts in all that end the run; None: ``consecutive`` alone ends it."""
    user_error_steps: int = 5
    """Steps in a row in which one of the environment's functions (``reset``, ``on_turn``, ``reward``, ``on_truncated``)
    failed for most members that called it: they end the run, with the first of its errors; 0: they never do."""
    untrained_batches: int = 100
    """Batches in a row without a gradient that end the run; 0: it goes on for ever. After five there is a warning. With
    128 trajectories in a batch and one in a thousand rewarded, a run ends by chance once in 300,000 starts; raise it
    where rewards are rarer or batches much smaller."""
    retry_delay: float = 0.1
    """Seconds before an attempt that follows a failure; doubles with each in a row, up to a minute."""

    def __post_init__(self) -> None:
        require_count("failures.member_retries", self.member_retries, least=0)
        require_count("failures.group_rerolls", self.group_rerolls, least=0)
        require_count("failures.consecutive", self.consecutive, least=1)
        require_count("failures.user_error_steps", self.user_error_steps, least=0)
        require_count("failures.untrained_batches", self.untrained_batches, least=0)
        if self.per_run is not None:
            require_count("failures.per_run", self.per_run, least=1)
        if not 0 <= self.retry_delay <= _LONGEST_DELAY_S:
            raise ConfigError.for_value(
                "failures.retry_delay", self.retry_delay, f"from 0 to {_LONGEST_DELAY_S:.0f} seconds"
            )


def is_accident(error: BaseException | None) -> bool:
    """True if the machinery failed, and another attempt may do better; a value or a request that is wrong stays so."""
    if isinstance(error, InvalidValue | RequestRefused):
        return False
    return isinstance(error, EnvironmentFailure | SamplingError)


@dataclass(slots=True)
class _Row:
    """Counts failures in a row. A failure counts if it began after the last that did: then its mark is ``counted``."""

    length: int = 0
    first: BaseException | None = None
    noted: bool = False
    """``first`` says already how many followed."""
    counted: int = 0

    def end(self) -> None:
        self.length, self.first, self.noted = 0, None, False

    def add(self, mark: int, error: BaseException) -> None:
        if self.first is None:
            self.first = error
        if mark == self.counted:
            self.counted += 1
            self.length += 1

    def ends_run(self, most: int, note: str) -> BaseException | None:
        """The first error, with a note of how many followed, if there were ``most``; None if there were fewer."""
        if self.first is None or self.length < most:
            return None
        if not self.noted:
            self.noted = True
            self.first.add_note(f"{self.length} {note} (failures.consecutive)")
        return self.first


@dataclass(slots=True)
class _Hook:
    """Counts what became of the calls of one function of the environment."""

    calls: int = 0
    failed: int = 0
    """Of the calls since the last step."""
    steps: int = 0
    """In a row in which most calls failed."""
    first: BaseException | None = None
    """The first error of these steps."""

    def add(self, error: BaseException | None) -> None:
        self.calls += 1
        if error is not None:
            self.failed += 1
            self.first = self.first or error

    def end_step(self) -> None:
        if not self.calls:
            return
        if 2 * self.failed > self.calls:
            self.steps += 1
        else:
            self.steps, self.first = 0, None
        self.calls = self.failed = 0


class FailureBudget:
    """Owns a run's count of failures. Whoever begins keeps the mark, and hands it back if it failed."""

    def __init__(self, rules: Failures) -> None:
        self.rules = rules
        self.failed_attempts = 0
        """Of members, in the whole run."""
        self._attempts = _Row()
        self._groups = _Row()
        self._hooks: dict[str, _Hook] = {}
        self._first: BaseException | None = None

    @property
    def delay_s(self) -> float:
        """Seconds to wait before something that failed is tried again."""
        return min(_LONGEST_DELAY_S, self.rules.retry_delay * 2.0 ** max(0, self._attempts.length - 1))

    def attempt_begins(self) -> int:
        """The mark of a member's attempt that begins now."""
        return self._attempts.counted

    def attempt_ended(self) -> None:
        """A member got its reward, or was ended by its group's deadline."""
        if self._attempts.first is not None:
            self._attempts.end()

    def attempt_failed(self, mark: int, error: BaseException) -> BaseException | None:
        """An attempt failed: the error to end the run with, if that was one too many."""
        self.failed_attempts += 1
        if self._first is None:
            self._first = error
        self._attempts.add(mark, error)
        final = self._attempts.ends_run(self.rules.consecutive, "attempts in a row failed, as this one did")
        if final is not None:
            return final
        if self.rules.per_run is not None and self.failed_attempts >= self.rules.per_run:
            self._first.add_note(f"the first of {self.failed_attempts} failed attempts (failures.per_run)")
            return self._first
        return None

    def hooks_called(self, called: Mapping[str, bool], error: BaseException | None) -> None:
        """A member has called these functions of its environment; ``error`` came from those that were not sound."""
        for hook, sound in called.items():
            self._hooks.setdefault(hook, _Hook()).add(None if sound else error)

    def step_ended(self) -> BaseException | None:
        """A step of the trainer ended: the error to end the run with, if one function failed most calls too long."""
        most = self.rules.user_error_steps
        for name, hook in self._hooks.items():
            calls, failed = hook.calls, hook.failed
            hook.end_step()
            if hook.first is not None and most and hook.steps >= most:
                counted = (
                    f"{name} failed most of its calls in {hook.steps} steps in a row, {failed} of {calls} in the last"
                )
                hook.first.add_note(f"{counted} (failures.user_error_steps)")
                return hook.first
        return None

    def group_begins(self) -> int:
        """The mark of a group that begins now."""
        return self._groups.counted

    def group_ended(self) -> None:
        """A group has members to train."""
        self._groups.end()

    def group_dropped(self, mark: int, error: BaseException) -> BaseException | None:
        """A group was dropped: the error to end the run with, if that was one too many."""
        self._groups.add(mark, error)
        return self._groups.ends_run(self.rules.consecutive, "groups in a row were dropped, the first for this")
