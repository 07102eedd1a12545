"""How much CPU does asyncrl itself spend on one sampled segment, and does that grow with concurrency?

The real engine, schedule and trainer on a sampler and a learner that answer at once, so that what is left is
orchestration. The anchor is the same run at the smallest concurrency: the figure should stay flat. Prints one JSON line
for each concurrency and kind of environment.

    uv run python benchmarks/rollout_overhead.py
"""

from __future__ import annotations

import argparse
import json
import time

import anyio

import asyncrl as rl
from asyncrl.testing import ByteRenderer, ScriptedLearner, ScriptedPublisher, ScriptedSampler, scripted_policy
from asyncrl.testing.scripted import END
from asyncrl.types import Message, Row, Trajectory

GROUP_SIZE = 16
FLAT_WITHIN = 1.3


class Chat(rl.Env):
    """A prompt of 64 tokens, 16 sampled in each of ``turns`` turns, 32 of the environment between two."""

    turns = 1

    async def reset(self, row: Row) -> list[Message]:
        """The prompt."""
        return [{"role": "user", "content": "p" * 64}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        """The next observation, or the end."""
        return None if traj.turns >= self.turns else [{"role": "user", "content": "o" * 32}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        """Varies within each group."""
        return float(traj.member % 2)


class ThreeTurns(Chat):
    """Two observations."""

    turns = 3


async def _cpu_per_segment(env: type[Chat], concurrency: int, trajectories: int) -> float:
    """Microseconds of CPU per segment in an asynchronous run with three batches in flight."""
    groups_per_step = max(1, concurrency // (3 * GROUP_SIZE))
    steps = max(3, trajectories // (groups_per_step * GROUP_SIZE))
    sampler = ScriptedSampler(tokens=lambda request: [65] * 15 + [END])
    engine = rl.RolloutEngine(
        scripted_policy(sampler=sampler, learner=ScriptedLearner(), publisher=ScriptedPublisher()),
        env=env,
        renderer=ByteRenderer(),
        schedule=rl.Schedule(concurrency=concurrency),
    )
    trainer = rl.AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=1e-5),
        groups_per_step=groups_per_step,
        group_size=GROUP_SIZE,
        max_staleness=2,
    )
    started = time.process_time()
    async for _ in trainer.run(list(range(64)), steps=steps):
        pass
    return (time.process_time() - started) / len(sampler.segments) * 1e6


def main() -> None:
    """Measure every case and print its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=4096, help="of each case")
    arguments = parser.parse_args()
    anyio.run(_cpu_per_segment, Chat, 64, 256)  # warm up
    for env in (Chat, ThreeTurns):
        anchor = 0.0
        for concurrency in (64, 256, 1024, 4096):
            figure = anyio.run(_cpu_per_segment, env, concurrency, arguments.trajectories)
            anchor = anchor or figure
            line = {
                "question": f"CPU per segment, {env.turns} turn(s), {concurrency} concurrent trajectories",
                "figure": round(figure, 1),
                "unit": "us",
                "anchor": "the same at 64 concurrent trajectories",
                "anchor_figure": round(anchor, 1),
                "ratio": round(figure / anchor, 3),
                "goal": FLAT_WITHIN,
                "meets_goal": figure <= FLAT_WITHIN * anchor,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
