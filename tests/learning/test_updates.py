"""Several updates for a batch, with a real learner: clips have something to do, and a resumed run has the same bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncrl as rl
from asyncrl.learning.losses import PPO, DecoupledPPO, Loss
from asyncrl.rollout.tools import Tool
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ByteRenderer, ScriptedPublisher, ScriptedSampler
from asyncrl.types import IntArray, Message, Row, Step, Trajectory
from tests.learning.tiny import LORA, adam_settings, load, random_sequences


@pytest.mark.parametrize("loss", [PPO(), DecoupledPPO()], ids=repr)
def test_the_second_update_has_another_ratio_and_clips(model_path: Path, loss: Loss) -> None:
    """At the step's start all ratios are 1; the first update moves them, and the second meets the bounds."""
    model = load(model_path)
    sequences = []
    for sequence in random_sequences(3):
        logprobs = np.zeros(len(sequence.tokens), dtype=np.float32)
        logprobs[1:] = model.logprobs(sequence.tokens, 1, sequence.temperature)
        sequences.append(replace(sequence, logprobs=logprobs))
    model.prepare_step(sequences, loss)
    clipped = []
    for update in range(2):
        result = model.forward_backward(sequences, loss, updates=update)
        clipped.append(result.sums["clipped_frac"])
        assert (np.abs(result.log_ratios).max() > 0.1) == (update == 1)
        model.optimizer_step(adam_settings(lr=3e-2), float(result.tokens))
    model.end_step()
    assert clipped[0] == 0
    assert clipped[1] > 0


class _Renderer(ByteRenderer):
    """The row's number, in the 32 tokens of the model."""

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        return np.array([1, 2, 4 + int(messages[0]["content"])], dtype=np.int32)


class _Chat(rl.Env):
    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": str(row)}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return random.Random(int(traj.tokens().sum())).random()


def _tokens(request: SegmentRequest) -> list[int]:
    draw = random.Random(f"{request.trajectory_id} {request.version}")
    return [draw.randrange(4, 32) for _ in range(draw.randrange(2, 9))] + [END]


async def _train(model: Path, directory: Path, *, steps: int, stop_after: int | None = None, **options: Any) -> Any:
    """The steps, and the weights when the run has ended."""
    learner = rl.TorchLearner(model, threads=1, device="cpu", **options)
    engine = rl.RolloutEngine(
        rl.Policy(learner, sampler=ScriptedSampler(tokens=_tokens), publisher=ScriptedPublisher()),
        env=_Chat,
        renderer=_Renderer(),
    )
    trainer = rl.AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=2e-2),
        groups_per_step=2,
        group_size=2,
        minibatches=2,
        epochs=2,
        max_staleness=3,
        loss="decoupled_ppo",
        batch_order="admission",
        checkpointing=rl.Checkpointing(directory, weights_every=100, on_signal=()),
    )
    taken: list[Step] = []
    weights: dict[str, torch.Tensor] = {}
    async with aclosing(trainer.run(list(range(6)), steps=steps)) as run:
        async for step in run:
            taken.append(step)
            weights = {name: tensor.clone() for name, tensor in (await learner.weights()).items()}
            if step.n == stop_after:
                break
    return taken, weights


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"lora": LORA}], ids=["full", "lora"])
async def test_a_resumed_run_repeats_all_updates_to_the_last_bit(
    model_path: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Minibatches and epochs from the journal, with the proximal policy of each step's start."""
    whole, expected = await _train(model_path, tmp_path / "whole", steps=3, **options)
    first, _ = await _train(model_path, tmp_path / "cut", steps=3, stop_after=2, **options)
    second, found = await _train(model_path, tmp_path / "cut", steps=3, **options)
    assert [step.n for step in (*first, *second)] == [1, 2, 3]
    assert [list(step.versions) for step in whole] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert second[0].metrics["recovery/steps_replayed"] == 8.0
    assert max(step.metrics["loss/clipped_frac"] for step in whole) > 0
    assert all(torch.equal(expected[name], found[name]) for name in expected)
