"""The recipe as a script. Going from synchronous to asynchronous training is changing the two constants.

uv run asyncrl install-smollm
uv run --extra smollm python envs/arithmetic/train.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from env import Addition, build_model, train_rows  # type: ignore[import-not-found]  # beside this script

import asyncrl as rl

MAX_STALENESS = 0  # asynchronous: 2
CONCURRENCY = 64  # asynchronous: 192


def report(step: rl.Step) -> None:
    """Print the reward and the age of a step, and what the model said first."""
    age, said = step.metrics["staleness/span_age_p99"], step.trajectories[0].messages[-1]["content"]
    print(f"step {step.n}: reward {step.metrics['reward/mean']:.3f}, age p99 {age:.0f}, the first answer {said!r}")


def main() -> None:
    """Train for 24 steps. The run is kept in a new folder in ``runs``, as its first line says."""
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
        rl.run(trainer, train_rows(), steps=24, on_step=report)


if __name__ == "__main__":
    main()
