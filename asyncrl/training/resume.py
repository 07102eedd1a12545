"""What becomes of unfinished trajectories when their run is resumed, as far as versions decide it.

With ``sampling_policy="trajectory"`` a trajectory needs the version that it began with, which servers may be able to
load again; where that cannot be had, the trajectory begins anew with the same seed. With ``segment`` it goes on under
the version that is committed, in a fresh cache namespace: no server remembers the prefixes of an earlier process by the
right name. Whether the environment can go on shows when the member gets its turn (``rollout/trajectory.py``).
"""

from __future__ import annotations

import anyio

from asyncrl.checkpoint.state import RunState
from asyncrl.events import Events, MemberResumed
from asyncrl.publishing.base import Publisher, VersionKeeper

__all__ = ["find_versions"]


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
