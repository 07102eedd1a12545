"""Trains the environment. `python train.py`, or `asyncrl train train.py --run-dir my-run`."""

from __future__ import annotations

import json
from pathlib import Path

import asyncrl as rl

from env import Digits
from tiny_model import build_model

FOLDER = Path(__file__).parent
STEPS = 80


def report(step: rl.Step) -> None:
    """Called after each step: print the reward, and the first of the conversations that were trained."""
    question, answer = (message["content"] for message in step.trajectories[0].messages)
    print(f"step {step.n}: reward {step.metrics['reward/mean']:.2f}; {question!r} was answered with {answer!r}")


def main() -> None:
    rows = [json.loads(line) for line in (FOLDER / "rows.jsonl").read_text().splitlines()]
    model = FOLDER / "model"  # a real model: rl.TorchLearner("Qwen/Qwen3-0.6B", ..)
    if not model.is_dir():
        build_model(model, words=[*"0123456789", *(row["question"] for row in rows)])
    policy = rl.Policy(rl.TorchLearner(model, lora=rl.LoraConfig(r=16, alpha=32)))
    engine = rl.RolloutEngine(
        policy,
        env=Digits,
        budget=rl.Budget(max_turns=1, max_turn_tokens=1),  # a real model needs some hundred tokens
        schedule=rl.Schedule(concurrency=160),  # conversations at the same time
    )
    trainer = rl.AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=2e-3),  # a real model: 1e-5 to 1e-4
        groups_per_step=10,  # rows of a step
        group_size=8,  # answers to each row, which are compared with each other
        max_staleness=2,  # how many versions old a trained token may be
    )
    rl.run(trainer, rows, steps=STEPS, on_step=report)


if __name__ == "__main__":
    main()
