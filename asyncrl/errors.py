"""Every error that asyncrl raises, by whose fault it is.

* AsyncRLError
  * ConfigError: the caller's options; also a ValueError. Raised before anything starts.
  * EnvironmentFailure: the user's environment or tool
    * InfrastructureError: raise it from a tool or environment when the machinery failed, not the model
    * InvalidValue: a reward, metric, message, tool result or snapshot that cannot be used
    * RolloutTimeout: a call ran past its deadline
  * SamplingError: the sampling servers
    * RequestRefused: a final answer of the server (4xx), with its text
    * ServerUnavailable: no server answered within the retry budget
    * ProtocolError: the server answered something that must not be trained
  * PublicationError: a version could not be made live
    * ProbeMismatch: server and learner disagree about the published policy
    * WeightsOverwritten: another run keeps writing its weights to the same servers
  * LearnerError: the training side
    * NonFiniteError: loss or gradient is NaN or infinite
  * NothingTrained: many batches in a row, or a whole run, had nothing to learn from; the message says why
  * CheckpointError: a run directory whose state cannot be used
  * ObserverError: a function that was subscribed to the run's events
  * StalenessError: a promise of asyncrl itself would be broken: a bug, please report it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import get_args

from asyncrl.plain import shown

__all__ = [
    "AsyncRLError",
    "CheckpointError",
    "ConfigError",
    "EnvironmentFailure",
    "InfrastructureError",
    "InvalidValue",
    "LearnerError",
    "NonFiniteError",
    "NothingTrained",
    "ObserverError",
    "ProbeMismatch",
    "ProtocolError",
    "PublicationError",
    "RequestRefused",
    "RolloutTimeout",
    "SamplingError",
    "ServerUnavailable",
    "StalenessError",
    "WeightsOverwritten",
    "require_choice",
    "require_count",
]

_LONGEST_KEY = 100
# Looking for one that is nearly the same takes the square of it.


class AsyncRLError(Exception):
    """Base of everything that asyncrl raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """An option has a value that is not allowed; the message has the key, the value found and what is allowed."""

    @classmethod
    def for_value(cls, key: str, found: object, allowed: str) -> ConfigError:
        """``key`` is what the user wrote, ``allowed`` completes the sentence "must be ..."."""
        return cls(f"{key} is {shown(found)}, but must be {allowed}")

    @classmethod
    def for_unknown_key(cls, key: str, known: Iterable[str], *, where: str = "") -> ConfigError:
        """Name the nearest known key, because most unknown keys are typing mistakes."""
        choices = sorted(known)
        near = difflib.get_close_matches(key[:_LONGEST_KEY], choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(choices)}"
        return cls(f"{where + ': ' if where else ''}unknown key {shown(key)}{hint}")


class EnvironmentFailure(AsyncRLError):
    """The user's environment or tool failed; the cause is chained."""


class InfrastructureError(EnvironmentFailure):
    """Raise this from a tool or an environment when the machinery failed and the model is not to blame.

    The member fails with this cause and is retried with a fresh environment; it never becomes a reward.
    """


class InvalidValue(EnvironmentFailure, ValueError):
    """User code gave a value that cannot be used; the message has the value, what is allowed, and the function.

    The member is dropped, and not tried again: the same code would give the same kind of value.
    """


class RolloutTimeout(EnvironmentFailure, TimeoutError):
    """A tool call, an environment call or a whole trajectory ran past its deadline."""


class SamplingError(AsyncRLError):
    """A sampling server did not give a usable segment."""


class RequestRefused(SamplingError):
    """The server refused the request for good (4xx); retrying would get the same answer."""


class ServerUnavailable(SamplingError):
    """No sampling server answered within the retry budget."""


class ProtocolError(SamplingError):
    """The server's answer breaks the wire contract: missing log-probabilities, wrong lengths, an unknown version."""


class PublicationError(AsyncRLError):
    """A policy version could not be made live on the servers."""


class ProbeMismatch(PublicationError):
    """After a publication, server and learner gave different log-probabilities for the probe prompt."""


class WeightsOverwritten(PublicationError):
    """Another run keeps writing its weights to the servers of this one; the message names it."""


class LearnerError(AsyncRLError):
    """The learner could not take a step; its gradients were discarded and no version was made."""


class NonFiniteError(LearnerError):
    """Loss or gradient norm is NaN or infinite."""


class NothingTrained(AsyncRLError):
    """Too many batches in a row, or a whole run, made no version: members were dropped, or rewards do not differ."""


class CheckpointError(AsyncRLError):
    """The state in a run directory is incomplete or does not fit together; the message names the file."""


class ObserverError(AsyncRLError):
    """An observer of events raised; the cause is chained. It ends the run: whoever counts or writes has lost something.

    Of its own kind because events are emitted in the middle of rollouts, whose own failures are values.
    """


class StalenessError(AsyncRLError):
    """A segment older than the bound reached the learner, or a due date became impossible. Never expected."""


def require_count(key: str, value: object, *, least: int) -> None:
    """Refuse anything but an integer of at least ``least``; True is not an integer here."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError.for_value(key, value, f"an integer of at least {least}")


def require_choice(key: str, value: object, choices: object) -> None:
    """Refuse a value that the ``Literal`` type ``choices`` does not list."""
    known = get_args(choices)
    if value not in known:
        raise ConfigError.for_value(key, value, "one of " + ", ".join(map(repr, known)))
