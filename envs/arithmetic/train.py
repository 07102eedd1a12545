"""The recipe as a script. Going from synchronous to asynchronous training is changing the two constants.

uv run --extra smollm python envs/arithmetic/train.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
from env import Addition, build_model, train_rows  # type: ignore[import-not-found]  # beside this script

import asyncrl as rl

MAX_STALENESS = 0  # asynchronous: 2
CONCURRENCY = 64  # asynchronous: 192


async def main() -> None:
    """Train for 24 steps and print each one's reward and age."""
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder))
        policy = rl.Policy(rl.TorchLearner(folder, lora=rl.LoraConfig(r=16, alpha=32), threads=1))
        engine = rl.RolloutEngine(
            policy,
            env=Addition,
            budget=rl.Budget(max_turns=1, max_generated_tokens=3),
            schedule=rl.Schedule(concurrency=CONCURRENCY),
            temperature=1.0,
            seed=0,
            renderer="text",
            stop=["\n"],
        )
        trainer = rl.AsyncTrainer(
            engine=engine,
            optimizer=rl.Adam(lr=3e-4, grad_clip_norm=1.0, schedule=rl.cosine(floor=0.1)),
            advantage=rl.GroupCentered(standardize=True),
            completion=rl.GroupCompletion(mode="wait"),
            truncation=rl.Truncation(train="reward"),
            loss="cispo",
            normalize="token",
            groups_per_step=8,
            group_size=8,
            max_staleness=MAX_STALENESS,
        )
        async for step in trainer.run(train_rows(), steps=24):
            metrics = step.metrics
            print(
                f"step {step.n}: reward {metrics['reward/mean']:.3f}, "
                f"age p99 {metrics['staleness/span_age_p99']:.0f}, {metrics['train/batch_seconds']:.1f} s"
            )


if __name__ == "__main__":
    anyio.run(main)
