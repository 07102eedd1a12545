"""What becomes of unfinished groups and trajectories when their run is resumed, as far as versions decide it.

The barrier must hold from the first commit on: what is restored can be trained in time. The journal sees to that, for
it has whatever freed the barrier since the snapshot. Should a group be restored whose due step has passed all the same,
or more groups than the steps up to it can train, then it begins anew, is counted and is said, and the run goes on.

With ``sampling_policy="trajectory"`` a trajectory needs the version that it began with, which servers may be able to
load again; where that cannot be had, the trajectory begins anew with the same seed. With ``segment`` it goes on under
the version that is committed, in a fresh cache namespace: no server remembers the prefixes of an earlier process by the
right name. Whether the environment can go on shows when the member gets its turn (``rollout/trajectory.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import anyio

from asyncrl.checkpoint.state import RunState
from asyncrl.errors import CheckpointError
from asyncrl.events import Events, MemberResumed
from asyncrl.publishing.base import Publisher, VersionKeeper
from asyncrl.rollout.progress import GroupProgress
from asyncrl.types import Trajectory

__all__ = ["begin_late_anew", "find_versions", "renew_unsampled", "require_versions"]


def begin_late_anew(state: RunState, *, groups_per_step: int) -> list[dict[str, object]]:
    """Let those groups begin anew that cannot all be trained in time; earlier due ones are kept.

    The rule of ``staleness.feasible``: up to each due step d at most (d - version + 1) * ``groups_per_step`` groups.
    Returns what there is to say of each.
    """
    kept = 0
    late: list[dict[str, object]] = []
    born = [(group.due, group) for group in state.groups.values() if group.due is not None]
    for due, group in sorted(born, key=lambda pair: (pair[0], not pair[1].is_finished)):
        if kept < (due - state.version + 1) * groups_per_step:
            kept += 1
            continue
        tokens = sum(traj.generated_tokens for traj in group.members)
        late.append({"group": group.index, "due": due, "version": state.version, "generated_tokens": tokens})
        group.begin_anew(group.next_start)
    return late


def require_versions(state: RunState) -> None:
    """Raise ``CheckpointError`` if something was sampled by a version that the run has not made."""
    for group in state.groups.values():
        for traj in group.members:
            found = {span.version for span in traj.spans} | {traj.version, traj.anchor}
            bad = [version for version in found if version is not None and not 0 <= version <= state.version]
            if bad:
                raise CheckpointError(
                    f"the saved state has tokens of version {bad[0]} in group {group.index}, but the run is at version "
                    f"{state.version}: its files are not of one run"
                )


def renew_unsampled(state: RunState) -> int:
    """Groups that were born but have nothing left are not born any more; returns how many.

    Their next first segment is a birth like any other. They keep the number of their attempts.
    """
    unsampled = [group for group in state.groups.values() if group.due is not None and not group.is_begun]
    for group in unsampled:
        group.renewed, group.due = group.next_start, None
    return len(unsampled)


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


def _unfinished(state: RunState) -> Iterator[tuple[GroupProgress, Trajectory]]:
    for group in state.groups.values():
        if group.progress is not None:
            yield from ((group.progress, traj) for traj in group.progress.active.values())
