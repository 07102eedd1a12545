"""Inputs of losses in plain numbers, and what a loss makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.learning.losses import Loss, LossInputs, LossOutput

__all__ = ["evaluate", "loss_inputs"]


def loss_inputs(
    logp: Sequence[float],
    mu: Sequence[float],
    advantages: Sequence[float],
    *,
    tokens_B: Sequence[int] | None = None,
    ages: Sequence[int] | None = None,
    updates: int = 0,
    dtype: torch.dtype = torch.float64,
    **data: Sequence[float],
) -> LossInputs:
    """One sequence, unless ``tokens_B`` says more, of tokens of age 1."""
    return LossInputs(
        logprobs=torch.tensor(logp, dtype=dtype, requires_grad=True),
        sampled_logprobs=torch.tensor(mu, dtype=dtype),
        advantages=torch.tensor(advantages, dtype=dtype),
        ages=torch.tensor([1] * len(logp) if ages is None else ages, dtype=torch.int32),
        tokens_B=[len(logp)] if tokens_B is None else tokens_B,
        updates=updates,
        data={name: torch.tensor(values, dtype=dtype) for name, values in data.items()},
    )


def evaluate(loss: Loss, inputs: LossInputs) -> tuple[LossOutput, list[float]]:
    """The output, and the gradient of the sum to each log-probability."""
    output = loss.per_token(inputs)
    (gradient,) = torch.autograd.grad(output.loss.sum(), inputs.logprobs)
    values: list[float] = gradient.tolist()
    return output, values
