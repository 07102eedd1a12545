from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from asyncrl.learning.advantages import Advantage, Batchwise, GroupCentered
from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.losses import CISPO, DecoupledPPO, Loss, Normalize
from asyncrl.learning.torch_model import TorchModel
from asyncrl.training.assembly import StepAssembly
from asyncrl.training.reported import StepReport
from asyncrl.training.rewards import TrainingReward
from asyncrl.types import Group, Span, SpanKind, Trajectory
from tests.learning.tiny import load

REWARDS: list[list[float | None]] = [
    [1.0, 0.0, 0.5],
    [1.0, None, None],  # too few for a baseline of its own: waits for the whole batch
    [2.0, 2.0, 2.0],  # no variance: counts, sends nothing
    [0.0, 1.0, None],
    [3.0, 0.0, 0.0],
]


@pytest.fixture(scope="module")
def model(model_path: Path) -> TorchModel:
    """All weights are trained, in float32."""
    return load(model_path)


def _groups() -> list[Group]:
    chance = np.random.default_rng(0)

    def member(reward: float | None) -> Trajectory:
        trajectory = Trajectory(id="", group=0, member=0, row=None, seed=0, reward=reward)
        for kind in (SpanKind.PROMPT, SpanKind.GENERATED, SpanKind.FRAMING, SpanKind.GENERATED, SpanKind.FRAMING):
            tokens = chance.integers(0, 32, chance.integers(1, 6)).astype(np.int32)
            generated = kind is SpanKind.GENERATED
            logprobs = chance.normal(-3, 0.5, len(tokens)).astype(np.float32)
            trajectory.append(
                Span(
                    kind=kind,
                    tokens=tokens,
                    logprobs=logprobs if generated else None,
                    version=0 if generated else None,
                )
            )
        return trajectory

    return [
        Group(index=index, row=None, members_G=[member(reward) for reward in rewards], seconds=0.0)
        for index, rewards in enumerate(REWARDS)
    ]


def _gradient(
    model: TorchModel, chunks: Sequence[Sequence[Group]], advantage: Advantage, normalize: Normalize, loss: Loss
) -> tuple[torch.Tensor, dict[str, float]]:
    """What the optimizer would get, as one vector, and the step's mean losses."""
    assembly = StepAssembly(
        advantage=advantage,
        normalize=normalize,
        reward=TrainingReward(),
        min_members=2,
        temperature=1.3,
        version=0,
        max_staleness=0,
        stale_policy="wait",
    )

    report = StepReport()

    def train(sequences: Sequence[TrainingSequence]) -> None:
        model.prepare_step(sequences, loss)
        report.record(sequences, model.forward_backward(sequences, loss))

    for chunk in chunks:
        train(assembly.add(chunk))
    train(list(chain.from_iterable(assembly.finish())))
    gradients = [parameter.grad.flatten() for parameter in model._causal.parameters() if parameter.grad is not None]
    gradient = torch.cat(gradients) / assembly.divisor
    model.discard_gradients()
    model.end_step()
    return gradient, dict(report.losses([assembly.divisor]))


def _assert_any_split_is_the_whole(model: TorchModel, advantage: Advantage, normalize: Normalize, loss: Loss) -> None:
    groups = _groups()
    model._micro_batch_tokens = 4096
    whole, losses = _gradient(model, [groups], advantage, normalize, loss)
    largest = float(whole.abs().max())
    assert largest > 1e-3
    chance = random.Random(0)
    for micro_batch_tokens in (10, 40, 4096):
        model._micro_batch_tokens = micro_batch_tokens
        chance.shuffle(groups)
        cuts = sorted(chance.sample(range(len(groups) + 1), 2))
        chunks = [groups[: cuts[0]], groups[cuts[0] : cuts[1]], groups[cuts[1] :]]
        split, split_losses = _gradient(model, chunks, advantage, normalize, loss)
        assert float((split - whole).abs().max()) < 1e-5 * max(1.0, largest), (micro_batch_tokens, cuts)
        assert split_losses == pytest.approx(losses, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("normalize", get_args(Normalize))
def test_any_split_and_order_gives_the_gradient_of_the_whole_batch(model: TorchModel, normalize: Normalize) -> None:
    """Groups in random order, chunks and micro-batches: the same gradient up to rounding, and the same mean losses.

    The mean is over the step, not over passes.
    """
    _assert_any_split_is_the_whole(model, GroupCentered(), normalize, CISPO())


@pytest.mark.parametrize(
    ("advantage", "loss"),
    [
        (GroupCentered(standardize=True), CISPO()),
        (GroupCentered(standardize="batch"), CISPO()),
        (Batchwise(standardize=True), CISPO()),
        (GroupCentered(), DecoupledPPO()),
    ],
    ids=repr,
)
def test_so_do_advantages_of_the_whole_batch_and_a_proximal_loss(
    model: TorchModel, advantage: Advantage, loss: Loss
) -> None:
    """A deviation known only at the end, and log-probabilities kept for each chunk, change nothing either."""
    _assert_any_split_is_the_whole(model, advantage, "sequence", loss)
