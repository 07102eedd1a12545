"""asyncrl's learner, through the interface that the trainer uses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import numpy as np

import asyncrl as rl
from asyncrl.learning.base import OptimizerSettings, TrainingSequence
from benchmarks.learners.contestant import Pass
from benchmarks.learners.workloads import Sample

__all__ = ["Ours"]

_STILL = OptimizerSettings(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=None)


class Ours:
    """``rl.TorchLearner`` with its defaults, all weights."""

    def __init__(self, model: Path, *, threads: int) -> None:
        self._learner = rl.TorchLearner(model, threads=threads)
        self._loss = rl.CISPO()
        anyio.run(self._learner.open)

    def run(self, sequences: Sequence[Sample]) -> Pass:
        """Forward and backward; leaves the gradients."""
        items = [_item(one) for one in sequences]
        result = anyio.run(self._learner.forward_backward, items, self._loss)
        sampled = np.concatenate([one.logprobs[one.mask] for one in sequences])
        return Pass(
            loss=result.sums["loss"], logprobs=(result.log_ratios + sampled).tolist(), entropy=result.sums["entropy"]
        )

    def gradient_norm(self) -> float:
        """What a step that changes nothing says; clears the gradients."""
        return anyio.run(partial(self._learner.optimizer_step, _STILL, divisor=1.0))["grad_norm"]

    def clear(self) -> None:
        """Forget the gradients."""
        anyio.run(self._learner.discard_gradients)


def _item(one: Sample) -> TrainingSequence:
    return TrainingSequence(
        tokens=one.tokens.astype(np.int32),
        logprobs=one.logprobs,
        mask=one.mask,
        ages=np.zeros(len(one.tokens), dtype=np.int32),
        advantage=one.advantage,
        weight=1.0,
    )
