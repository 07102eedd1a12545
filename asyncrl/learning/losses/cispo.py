"""CISPO: a capped importance weight, and a gradient for every token."""

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

__all__ = ["CISPO"]


@dataclass(frozen=True, kw_only=True)
class CISPO(NamedLoss):
    """-sg(min(r, eps_max)) * A * logp (arXiv 2506.13585): a capped weight, and a gradient for every token."""

    eps_max: float = 6.0
    """Cap of the importance ratio; only a token that became much likelier since it was sampled reaches it."""
    name: ClassVar[str] = "cispo"
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "clipped_frac")

    def __post_init__(self) -> None:
        require_positive("loss.eps_max", self.eps_max)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``clipped_frac`` counts ratios above ``eps_max``."""
        ratio = importance_ratio(inputs.logprobs, inputs.sampled_logprobs).detach()
        loss = -ratio.clamp(max=self.eps_max) * inputs.advantages * inputs.logprobs
        return loss_output(loss, inputs, clipped_frac=ratio > self.eps_max)
