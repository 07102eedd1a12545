"""How long does a save hold the event loop, with 256 trajectories of 8,192 tokens under way?"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np

from asyncrl.checkpoint.snapshots import Snapshots
from asyncrl.events import Events
from asyncrl.observe.metrics import MetricsRecorder
from asyncrl.observe.untrained import Untrained
from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.batches import Batches
from asyncrl.scheduling.ledger import Ledger
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.training.record import RunRecord
from asyncrl.types import Span, SpanKind, Trajectory
from benchmarks.answer import Answer

__all__ = ["longest_pause"]

_GROUPS, _MEMBERS, _TOKENS, _SPANS = 32, 8, 8192, 16
_SAVES = 5
_GOAL_S = 0.020
_RIVER_S = 5.4
# river-client 0.16.0 walks every token on the loop: 2.5 us each, measured on two cores.


def _trajectory(group: int, member: int, draw: np.random.Generator) -> Trajectory:
    traj = Trajectory(id=f"{group:06d}-{member:03d}", group=group, member=member, row=None, seed=0)
    for _ in range(_SPANS):
        _extend(traj, _TOKENS // _SPANS, draw)
    traj.metrics = {"tool_calls": 8.0, "tool_seconds": 3.5}
    return traj


def _extend(traj: Trajectory, tokens: int, draw: np.random.Generator) -> None:
    ids, logprobs = draw.integers(0, 32_000, tokens, dtype=np.int32), draw.random(tokens, dtype=np.float32)
    traj.append(Span(kind=SpanKind.GENERATED, tokens=ids, logprobs=logprobs, version=1))
    traj.messages.append({"role": "assistant", "content": "word " * (tokens * 4 // 5)})


def _capture(draw: np.random.Generator) -> RunRecord:
    admission = Admission(slots=_GROUPS, max_staleness=2, group_size=_MEMBERS)
    clock = PolicyClock()
    capture = RunRecord(
        admission=admission,
        batches=Batches(admission=admission, clock=clock, groups_per_step=_GROUPS),
        ledger=Ledger(),
        recorder=MetricsRecorder(started=0.0),
        clock=clock,
        untrained=Untrained(Events(), most=0, oldest_age=None),
    )
    for group in range(_GROUPS):
        admission.admit_nowait()
        admission.birth(group, 0)
        members = {member: _trajectory(group, member, draw) for member in range(_MEMBERS)}
        capture.progress(group).active.update(members)
    return capture


async def _longest_s() -> float:
    draw = np.random.default_rng(0)
    capture = _capture(draw)
    late_s: list[float] = []
    longest_s: list[float] = []

    async def tick() -> None:
        while True:
            expected = time.perf_counter() + 0.001
            await anyio.sleep(0.001)
            late_s.append(time.perf_counter() - expected)

    with tempfile.TemporaryDirectory() as folder:
        snapshots = Snapshots(Path(folder))
        gc.collect()
        gc.freeze()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            for _ in range(_SAVES):
                late_s.clear()
                started = time.perf_counter()
                state = capture.state()
                late_s.append(time.perf_counter() - started)
                await anyio.to_thread.run_sync(snapshots.write, state)
                longest_s.append(max(late_s))
                for group in capture.unfinished:
                    _extend(capture.progress(group).active[0], 512, draw)
            tasks.cancel_scope.cancel()
        snapshots.close()
        gc.unfreeze()
    return statistics.median(longest_s)


def longest_pause() -> Answer:
    """The longest time that the loop was late or held by a save; the median of some saves, for other processes hold it
    too."""
    figure = anyio.run(_longest_s)
    return Answer(
        question=f"event loop held by a save, {_GROUPS * _MEMBERS} trajectories of {_TOKENS} tokens under way",
        figure=figure * 1000,
        unit="ms",
        anchor="river-client 0.16.0",
        anchor_figure=_RIVER_S * 1000,
        ratio=figure / _RIVER_S,
        goal=f"less than {_GOAL_S * 1000:g} ms",
        meets_goal=figure < _GOAL_S,
    )
