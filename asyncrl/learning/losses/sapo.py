"""SAPO: a soft gate where PPO has a clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.learning.losses.base import (
    LossInputs,
    LossOutput,
    NamedLoss,
    importance_ratio,
    loss_output,
    require_positive,
)

__all__ = ["SAPO"]


@dataclass(frozen=True, kw_only=True)
class SAPO(NamedLoss):
    """-f(r) A, f(r) = sigmoid(tau (r - 1)) * 4 / tau, tau = tau_positive for A > 0, else tau_negative.

    arXiv 2511.20347. The gradient goes through r and is weighted by r * 4 g (1 - g), g = sigmoid(tau (r - 1)): 1 at
    r = 1, and less and less on both sides, for a negative advantage the sooner.
    """

    tau_positive: float = 1.0
    """How soon the gate closes where the advantage is positive."""
    tau_negative: float = 1.05
    """How soon it closes where it is negative; such gradients spread over all other tokens and are less stable."""
    name: ClassVar[str] = "sapo"
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "gate")

    def __post_init__(self) -> None:
        require_positive("loss.tau_positive", self.tau_positive)
        require_positive("loss.tau_negative", self.tau_negative)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``gate`` is 4 g (1 - g)."""
        ratio = importance_ratio(inputs.logprobs, inputs.sampled_logprobs)
        positive = inputs.advantages > 0
        tau = inputs.advantages.new_full((), self.tau_positive).where(positive, self.tau_negative)
        gate = (tau * (ratio - 1)).sigmoid()
        return loss_output(-gate * 4 / tau * inputs.advantages, inputs, gate=4 * gate * (1 - gate))
