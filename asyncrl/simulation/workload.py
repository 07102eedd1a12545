"""What a simulation plays back: scripts of trajectories, and what sampling, training and publishing cost.

Values only. ``recorded`` takes them from a run's events, ``synthetic`` makes them from distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.simulation.cost import Cost, LoadModel

__all__ = ["GroupScript", "MemberScript", "TurnScript", "Workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnScript:
    """One turn: what the model reads anew, what it writes, and how long the environment takes to answer.

    Example: a prompt of 40 tokens of which a sibling had 30 in the cache, 200 tokens written, a tool of 1.5 seconds::

        TurnScript(new_tokens=40, uncached_tokens=10, tokens=200, reply_s=1.5)
    """

    new_tokens: int
    """Context that was not there in the turn before: the prompt, or the environment's messages."""
    uncached_tokens: int
    """Context tokens that the server computes if it still has the earlier turns in its cache."""
    tokens: int
    """Sampled tokens. ``Budget.segment_tokens`` of the simulated recipe divides them into requests."""
    reply_s: float
    """From the last token to the wish for the next one; after the last turn, to the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberScript:
    """One trajectory."""

    turns: tuple[TurnScript, ...]
    reward: float
    truncated: bool = False
    """It did not end by itself: after the last turn it would have gone on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScript:
    """The trajectories of one row; lengths and rewards within a group belong together."""

    members: tuple[MemberScript, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that takes time in a run."""

    groups: Sequence[GroupScript]
    """In the order of the run; the simulated run has its own number of them, see ``rows``."""
    sampling: LoadModel
    """Of a request: (1, tokens, uncached context tokens)."""
    training: Cost
    """Of a forward-backward pass: (1, sequences, trained tokens)."""
    optimizer: Cost
    """Of an optimizer step: (1,)."""
    staging: Cost
    """From the commit until the trainer may go on: (1,)."""
    publication: LoadModel
    """From there until the samplers have the version: (1,). They finish first what they are doing."""
    reset_s: float = 0.0
    """What an environment takes before the first request."""
    margins: tuple[int, int] = (0, 0)
    """Of the groups so many at the beginning and at the end are not of the steady state."""

    def rows(self, *, before: int, counted: int, after: int) -> list[GroupScript]:
        """Groups for a simulated run: those that count are spread evenly over the steady state, in their order.

        So a run that changes is all there, and every schedule is measured on the same part of it. ``before`` and
        ``after`` them are groups of its beginning and its end.
        """
        first, last = self.margins
        end = len(self.groups) - last
        return [
            *_spread(self.groups[:first] or self.groups, before),
            *_spread(self.groups[first:end] or self.groups, counted),
            *_spread(self.groups[end:] or self.groups, after),
        ]


def _spread(groups: Sequence[GroupScript], count: int) -> list[GroupScript]:
    return [groups[place * len(groups) // count] for place in range(count)]
