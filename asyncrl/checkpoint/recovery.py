"""What becomes of unfinished trajectories when their run is resumed, as far as policy versions decide it.

With ``sampling_policy="trajectory"`` a trajectory needs the version that it began with, which servers may be able to
load again; where that cannot be had, the trajectory begins anew with the same seed. With ``segment`` it goes on under
the version that is committed, in a fresh cache namespace: no server remembers the prefixes of an earlier process by the
right name. Whether the environment can go on shows when the member gets its turn (``rollout/trajectory.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import anyio

from asyncrl.checkpoint.state import RunState
from asyncrl.events import Event, Events, MemberResumed
from asyncrl.publishing.base import Publisher, VersionKeeper
from asyncrl.rollout.progress import GroupProgress
from asyncrl.types import Trajectory

__all__ = ["Recovery", "find_versions"]


class Recovery:
    """Counts what a resumed run had to do again. Subscribe ``observe``."""

    def __init__(self) -> None:
        self.steps_replayed = 0
        self._recovered = 0
        self._dropped = 0

    def observe(self, event: Event) -> None:
        """Count ``event``."""
        if isinstance(event, MemberResumed):
            self._recovered += event.recovered
            self._dropped += not event.recovered

    def metrics(self) -> Mapping[str, float]:
        """Sums since this process began; the keys are always the same."""
        return {
            "recovery/steps_replayed": float(self.steps_replayed),
            "recovery/trajectories_recovered": float(self._recovered),
            "recovery/trajectories_dropped_on_resume": float(self._dropped),
        }


async def find_versions(state: RunState, publisher: Publisher, *, pins: bool, events: Events) -> None:
    """Prepare the unfinished trajectories of ``state`` for the versions that there will be: its own, and older ones.

    ``pins``: trajectories keep their version. Each of them then holds it from now on.
    """
    for _, traj in _unfinished(state):
        if not pins or not traj.generated_tokens or traj.over or traj.truncated is not None:
            # Nothing binds it: what it samples next, if anything, is stamped anew.
            traj.version = traj.anchor = None
    wanted = {traj.version for _, traj in _unfinished(state) if traj.version is not None} - {state.version}
    found = await publisher.adopt(wanted) if isinstance(publisher, VersionKeeper) else frozenset[int]()
    for progress, traj in list(_unfinished(state)):
        if traj.version is None or traj.error is not None:
            continue
        if traj.version in found or traj.version == state.version:
            publisher.hold(traj.version)
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


def _unfinished(state: RunState) -> Iterator[tuple[GroupProgress, Trajectory]]:
    for group in state.groups.values():
        if group.progress is not None:
            yield from ((group.progress, traj) for traj in group.progress.active.values())
