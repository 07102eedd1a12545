"""Groups as values: what is to be rolled out with which seeds, and what there is to say of one that failed or never
sampled.

A seed is a hash of what it is for. A sum of such numbers would not do: run 1 would draw for member 0 what run 0 draws
for member 1. A hash shares nothing, and is the same in every process, so that a resumed run has the same seeds.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b, blake2s
from struct import pack

import anyio

from asyncrl.events import GroupDropped, Notice
from asyncrl.plain import copied, error_text
from asyncrl.rollout.usercode import place_of
from asyncrl.scheduling.rules import GroupCompletion
from asyncrl.types import DropReason, Group, Row, Trajectory

__all__ = ["FailedGroup", "GroupPlan", "derived", "derived_for_request", "unsampled"]

_SHORT = reprlib.Repr()
# A row is named, not printed: a long one loses its middle.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What to run: ``size`` trajectories of ``row``; ``index`` is the admission order, and the priority."""

    index: int
    row: Row
    size: int
    seed: int
    prefix: str = ""
    """Sets apart the trajectory ids of an evaluation."""
    completion: GroupCompletion = field(default_factory=GroupCompletion)

    def member(self, member: int, attempt: int = 1) -> Trajectory:
        """A fresh trajectory for that place in the group, with a copy of the row: what an environment does to it, the
        others do not see.

        Another attempt draws anew: what the model wrote may be what the machinery could not bear. All evaluations draw
        the same, so that they differ by the policy only.
        """
        return Trajectory(
            id=f"{self.prefix}{self.index:06d}-{member:03d}",
            group=self.index,
            member=member,
            row=copied(self.row),
            seed=derived(self.seed, "evaluation" if self.prefix else "training", self.index, member, attempt),
            attempt=attempt,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FailedGroup:
    """A group that was given up: no member of it will be trained."""

    index: int
    row: Row
    error: BaseException
    """Why: of the member that failed for good, or of the first one if all failed."""
    generated_tokens: int
    """Of members that did not fail themselves."""

    def event(self) -> GroupDropped:
        """The event that reports it, to be emitted once the group's slot is free."""
        return GroupDropped(
            time=anyio.current_time(),
            group=self.index,
            reason=DropReason.FAILED,
            error=error_text(self.error),
            where=place_of(self.error),
            generated_tokens=self.generated_tokens,
        )


def unsampled(group: Group) -> Notice | None:
    """A warning that names the row if its group was truncated before anything was sampled, such as by its prompt."""
    truncated = Counter(str(traj.truncated) for traj in group.members_G if traj.truncated is not None)
    if not truncated or any(traj.generated_tokens for traj in group.members_G):
        return None
    keys: dict[str, object] = {
        "group": group.index,
        "row": _SHORT.repr(group.row),
        "truncated": dict(truncated),
        "prompt_tokens": max(traj.context_tokens for traj in group.members_G),
    }
    return Notice(time=anyio.current_time(), name="row_not_sampled", level="warning", keys=keys)


def derived(*parts: int | str) -> int:
    """A seed from 0 to 2**31 - 1, which servers and numpy take. Example: ``derived(run_seed, group, member)``."""
    digest = blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF


def derived_for_request(seed: int, group: int, member: int, attempt: int, segment: int) -> int:
    """The seed of one sampling request, of a trajectory with ``seed``. Takes half as long as ``derived``, for it is
    asked for each segment.
    """
    digest = blake2s(pack("<5q", seed, group, member, attempt, segment), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF
