"""The policy gradient with the importance ratio as its weight, and without any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.learning.losses.base import LossInputs, LossOutput, NamedLoss, importance_ratio, loss_output

__all__ = ["ImportanceSampling", "PolicyGradient"]


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(NamedLoss):
    """-r A: unbiased and unbounded; use it with little staleness."""

    name: ClassVar[str] = "importance_sampling"

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses, whose gradient goes through the ratio."""
        ratio = importance_ratio(inputs.logprobs, inputs.sampled_logprobs)
        return loss_output(-ratio * inputs.advantages, inputs)


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(NamedLoss):
    """-A logp (REINFORCE): no correction for staleness at all."""

    name: ClassVar[str] = "policy_gradient"
    corrects_sampling: ClassVar[bool] = False

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses."""
        return loss_output(-inputs.advantages * inputs.logprobs, inputs)
