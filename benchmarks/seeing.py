"""What does it cost to keep what was said?

CPU of a run that keeps rollouts at 1,024 concurrent trajectories, over that of the same run without the thread that
encodes and writes them: the machine is equally busy for both. Runs that keep nothing show what else threads do. And how
long the event loop waits while a batch of long conversations is encoded and written beside it, and an idle one without.
Prints one JSON line for each question.

    uv run python -m benchmarks.seeing
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path

import anyio

from asyncrl.events import Events, RolloutsFinished
from asyncrl.observe.kept import KeptRollouts
from asyncrl.observe.lag import settled_heap
from asyncrl.observe.rollouts import write_rollouts
from asyncrl.types import Group, Trajectory
from benchmarks.answer import Answer
from benchmarks.rollouts import GROUP_SIZE, Load, scripted_run

CPU_RATIO = 1.05
HOLD_S = 0.005
CONCURRENCY = 1024
KEPT = {
    "none": KeptRollouts(rollouts="none"),
    "extremes": KeptRollouts(),
    "all": KeptRollouts(rollouts="all"),
}
_TICK_S = 0.001
_IDLE_S = 0.1
# As long as a batch takes.


async def _cpu_per_segment(load: Load, kept: KeptRollouts) -> tuple[float, float]:
    """Microseconds of CPU of all threads, and of the event loop's: the others keep rollouts and do nothing else."""
    gc.collect()
    gc.freeze()  # modules and classes are not looked at again
    run = scripted_run(load)
    with tempfile.TemporaryDirectory() as directory:
        started, loop_started = time.process_time(), time.thread_time()
        async with write_rollouts(Path(directory), run.trainer.events, kept):
            segments = await run.train()
        all_s, loop_s = time.process_time() - started, time.thread_time() - loop_started
    return all_s / segments * 1e6, loop_s / segments * 1e6


def _cost(turns: int, trajectories: int, repeats: int) -> None:
    """The median run of several, interleaved."""
    load = Load(turns=turns, concurrency=CONCURRENCY, max_staleness=2, trajectories=trajectories)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in KEPT}
    for _ in range(repeats):
        for name, kept in KEPT.items():
            runs[name].append(anyio.run(_cpu_per_segment, load, kept))
    for name, measured in runs.items():
        figure, anchor = sorted(measured, key=lambda run: run[0] / run[1])[repeats // 2]
        answer = Answer(
            question=f"CPU per segment, {turns} turn(s), {CONCURRENCY} concurrent, rollouts = {name!r}",
            figure=figure,
            unit="us",
            anchor="the event loop's thread in the same run, which keeps nothing",
            anchor_figure=anchor,
            ratio=figure / anchor,
            goal=f"ratio at most {CPU_RATIO}",
            meets_goal=figure <= CPU_RATIO * anchor,
        )
        print(answer.line(), flush=True)


def _long_batch() -> RolloutsFinished:
    """The trajectories of a batch at 1,024 concurrent, each of 21 messages and 40 KB."""
    groups = []
    for index in range(CONCURRENCY // (3 * GROUP_SIZE)):
        members = [
            Trajectory(
                id=f"{index:06d}-{member:03d}",
                group=index,
                member=member,
                row={"question": "q" * 500},
                seed=0,
                reward=float(member),
                messages=[
                    {"role": role, "content": "A line of what was said.\n" * 80}
                    for role in ("user", *["assistant", "tool"] * 10)
                ],
            )
            for member in range(GROUP_SIZE)
        ]
        groups.append(Group(index=index, row=members[0].row, members_G=members, seconds=1.0))
    return RolloutsFinished(time=0.0, n=1, version=0, groups=groups)


class _Waits:
    """How late a timer of 1 ms is at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = anyio.current_time() + _TICK_S
            await anyio.sleep_until(due)
            self.longest_s = max(self.longest_s, anyio.current_time() - due)


async def _longest_wait(kept: KeptRollouts) -> float:
    """The most milliseconds that the event loop waited while a batch was kept beside it."""
    events, event, waits = Events(), _long_batch(), _Waits()
    with tempfile.TemporaryDirectory() as directory, settled_heap():  # as a run has it
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waits.run)
            async with write_rollouts(Path(directory), events, kept):
                events.emit(event)  # the block is left when it is on the disk
            if kept.rollouts == "none":
                await anyio.sleep(_IDLE_S)
            tasks.cancel_scope.cancel()
    return waits.longest_s * 1e3


def _hold(repeats: int) -> None:
    """The least of many: what other processes do to a timer is not asked."""
    best: dict[str, float] = {}
    for _ in range(4 * repeats):
        for name, kept in KEPT.items():
            figure = anyio.run(_longest_wait, kept)
            best[name] = min(figure, best.get(name, figure))
    for name in ("extremes", "all"):
        answer = Answer(
            question=f"longest wait of the event loop while a batch of 13 MB is kept, rollouts = {name!r}",
            figure=best[name],
            unit="ms",
            anchor="an idle loop",
            anchor_figure=best["none"],
            ratio=best[name] / best["none"],
            goal=f"at most {HOLD_S * 1e3:g} ms",
            meets_goal=best[name] <= HOLD_S * 1e3,
        )
        print(answer.line(), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=4096, help="of each run")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    warm_up = Load(turns=3, concurrency=64, max_staleness=2, trajectories=64)
    anyio.run(_cpu_per_segment, warm_up, KEPT["all"])
    for turns in (1, 3):
        _cost(turns, arguments.trajectories, arguments.repeats)
    _hold(arguments.repeats)


if __name__ == "__main__":
    main()
