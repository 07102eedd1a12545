"""Synchronous runs whose batches are trained in chunks, in the order in which groups happen to finish.

What the optimizer gets must be that of one pass over the whole batch. The learner here is a sum in float64, so that
nothing but the trainer's own arithmetic can differ.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

import asyncrl as rl
from asyncrl.events import ChunkTrained, Event, Events
from asyncrl.learning.advantages import Advantage
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import Normalize
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import (
    END,
    ByteRenderer,
    ScriptedLearner,
    ScriptedSampler,
    heavy_tail,
    run_virtual,
    scripted_policy,
)
from asyncrl.types import Message, Row, Trajectory

_GROUPS_PER_STEP, _GROUP_SIZE, _STEPS = 5, 4, 2


class _Env(rl.Env):
    """One or two turns. In every fifth group all members but one fail, so that it has no baseline of its own."""

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": f"row {row}"}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        return [{"role": "user", "content": "more"}] if traj.turns == 1 and traj.seed % 3 == 0 else None

    async def reward(self, traj: Trajectory, row: Row) -> float:
        if row % 5 == 1 and traj.member != 2:
            raise ValueError("no grade")
        return random.Random(traj.id).choice([0.0, 0.25, 1.0, 3.0])


def _tokens(request: SegmentRequest) -> list[int]:
    """A few tokens that are a matter of the trajectory alone; some never end and are truncated."""
    source = random.Random(f"{request.trajectory_id}/{len(request.input_ids)}")
    return [source.randrange(32, 127) for _ in range(source.randrange(1, 9))] + [END]


class _Summing(ScriptedLearner):
    """The gradient of a token is a vector of some functions of it."""

    def __init__(self) -> None:
        super().__init__(train_s=0.1)
        self.gradient: npt.NDArray[np.float64] = np.zeros(3)
        self.gradients: list[npt.NDArray[np.float64]] = []

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        result = await super().forward_backward(sequences, loss, updates=updates)
        value = 0.0
        for sequence in sequences:
            token = sequence.tokens[sequence.mask].astype(np.float64)
            logprob = sequence.logprobs[sequence.mask].astype(np.float64)
            factor = sequence.weight * sequence.advantage
            self.gradient += factor * np.stack([np.cos(token), np.sin(token / 7), logprob]).sum(axis=1)
            value -= factor * float(logprob.sum())
        return replace(result, sums={"loss": value})

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        self.gradients.append(self.gradient / divisor)
        self.gradient = np.zeros(3)
        return await super().optimizer_step(settings, divisor=divisor)


def _trained(
    advantage: Advantage, normalize: Normalize, overlap: rl.ForwardBackwardBatch | None, seed: int
) -> tuple[npt.NDArray[np.float64], list[float], int]:
    """The gradients and losses of the steps of a run, and the most passes that one of them took."""
    learner = _Summing()
    duration = heavy_tail(seed)
    chunks: Counter[int] = Counter()

    def count(event: Event) -> None:
        if isinstance(event, ChunkTrained):
            chunks[event.n] += 1

    events = Events()
    events.subscribe(count)
    engine = rl.RolloutEngine(
        scripted_policy(learner=learner, sampler=ScriptedSampler(seconds=lambda request: duration(), tokens=_tokens)),
        env=_Env,
        budget=rl.Budget(max_generated_tokens=7),
        renderer=ByteRenderer(),
    )
    trainer = rl.AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=1e-3),
        groups_per_step=_GROUPS_PER_STEP,
        group_size=_GROUP_SIZE,
        max_staleness=0,
        advantage=advantage,
        normalize=normalize,
        forward_backward_batch=overlap,
        events=events,
    )
    losses: list[float] = []

    async def main() -> None:
        async for step in trainer.run(list(range(_STEPS * _GROUPS_PER_STEP)), steps=_STEPS):
            losses.append(step.metrics["loss/loss"])

    run_virtual(main, seed=seed)
    return np.stack(learner.gradients), losses, max(chunks.values())


@pytest.mark.parametrize("normalize", get_args(Normalize))
@pytest.mark.parametrize(
    "advantage",
    [rl.GroupCentered(), rl.GroupCentered(standardize=True), rl.GroupCentered(standardize="batch"), rl.Batchwise()],
    ids=repr,
)
def test_any_chunks_in_any_order_give_the_gradient_of_the_whole_batch(
    advantage: Advantage, normalize: Normalize
) -> None:
    """Random splits and arrival orders: the same divided sums to 1e-6, and the same losses, in every step."""
    whole, losses, passes = _trained(advantage, normalize, None, seed=0)
    assert passes == 1
    assert np.abs(whole).max(axis=1).min() > 1e-2
    most = 0
    for seed in range(1, 7):
        # Thresholds of half a group to two groups, by count or by tokens; other advantages wait for the whole batch.
        split = rl.ForwardBackwardBatch(min_sequences=2 + seed, min_tokens=1000 if seed % 2 else 40)
        overlap = split if isinstance(advantage, rl.GroupCentered) else None
        gradients, split_losses, passes = _trained(advantage, normalize, overlap, seed)
        assert np.abs(gradients - whole).max() < 1e-6
        assert split_losses == pytest.approx(losses, abs=1e-6)
        most = max(most, passes)
    assert (most > 2) == isinstance(advantage, rl.GroupCentered)
