"""Every schedule of a small trace, by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks.clairvoyant import Rollouts, Trace

__all__ = ["best_end"]


def best_end(trace: Trace) -> float:
    """The earliest end of all schedules that train no group after its due step."""
    return min(_ends(trace, [], []))


def _ends(trace: Trace, batches: list[tuple[int, ...]], commits: list[float]) -> Iterator[float]:
    """The ends of all schedules that begin with these batches, committed at these times."""
    if len(batches) == trace.steps:
        yield commits[-1]
        return
    published, rollouts = _so_far(trace, commits)
    outstanding = sorted(set(range(len(rollouts.finished))) - {group for batch in batches for group in batch})
    for batch in itertools.combinations(outstanding, trace.groups_per_step):
        versions = [sum(time <= rollouts.born[group] for time in published) - 1 for group in batch]
        if len(batches) - min(versions) > trace.max_staleness:
            continue
        ready = max(rollouts.finished[group] for group in batch)
        now = max(commits[-1] if commits else 0.0, ready) + trace.step_s
        yield from _ends(trace, [*batches, batch], [*commits, now])


def _so_far(trace: Trace, commits: list[float]) -> tuple[list[float], Rollouts]:
    """Publication times, and the groups that were admitted, after these commits."""
    rollouts = Rollouts(trace)
    published = [0.0]
    rollouts.admit(0, 0.0)
    for version, commit in enumerate(commits, start=1):
        published.append(max(commit, published[-1]) + trace.publication_s[version - 1])
        rollouts.admit(version, published[-1])
    return published, rollouts
