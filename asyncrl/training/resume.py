"""What a resume costs, and what becomes of unfinished trajectories then, as far as versions decide it.

With ``sampling_policy="trajectory"`` a trajectory needs the version that it began with, which servers may be able to
load again; where that cannot be had, the trajectory begins anew with the same seed. With ``segment`` it goes on under
the version that is committed, in a fresh cache namespace: no server remembers the prefixes of an earlier process by the
right name. Whether the environment can go on shows when the member gets its turn (``rollout/trajectory.py``).
"""

from __future__ import annotations

import anyio

from asyncrl.checkpoint.state import RunState
from asyncrl.events import ChunkTrained, Event, Events, LearnerStepped, MemberResumed
from asyncrl.publishing.base import Publisher, VersionKeeper

__all__ = ["ReplayCost", "find_versions"]

_UNNOTICED_S = 5.0
# Whoever resumes waits longer for the model alone; and whoever stops wants to be gone.


class ReplayCost:
    """Owns how long a resume would have to repeat updates: as long as they took since the last saved weights.

    Subscribe ``observe`` to ``KINDS``.
    """

    KINDS = (ChunkTrained, LearnerStepped)

    def __init__(self) -> None:
        self.replay_s = 0.0
        self.write_s = 0.0
        """What the last save of weights took; 0 if none was made yet."""

    def observe(self, event: Event) -> None:
        """A part of an update was made."""
        if isinstance(event, ChunkTrained | LearnerStepped):
            self.replay_s += event.seconds

    def replayed(self, seconds: float) -> None:
        """Updates of an earlier process were repeated, and would have to be once more."""
        self.replay_s += seconds

    def written(self, seconds: float) -> None:
        """Weights were saved: there is nothing to repeat."""
        self.replay_s, self.write_s = 0.0, seconds

    @property
    def is_larger(self) -> bool:
        """True if repeating takes clearly longer than saving weights now."""
        return self.replay_s > self.write_s + _UNNOTICED_S


async def find_versions(state: RunState, publisher: Publisher, *, pins: bool, events: Events) -> None:
    """Prepare the unfinished trajectories of ``state`` for the versions that there will be: its own, and older ones.

    ``pins``: trajectories keep their version, which each of them has pinned from now on.
    """
    for _, traj in state.unfinished:
        if not pins or not traj.generated_tokens or traj.over or traj.truncated is not None:
            # Nothing binds it: what it samples next, if anything, is stamped anew.
            traj.version = traj.anchor = None
    wanted = {traj.version for _, traj in state.unfinished if traj.version is not None} - {state.version}
    found = await publisher.adopt(wanted) if isinstance(publisher, VersionKeeper) else frozenset[int]()
    for progress, traj in state.unfinished:
        if traj.version is None or traj.error is not None:
            continue
        if traj.version in found or traj.version == state.version:
            publisher.pin(traj.version)
            continue
        del progress.active[traj.member]
        progress.attempts[traj.member] -= 1
        events.emit(
            MemberResumed(
                time=anyio.current_time(),
                group=traj.group,
                member=traj.member,
                recovered=False,
                generated_tokens=traj.generated_tokens,
            )
        )
