"""IcePop: tokens on which sampler and learner disagree too much are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.errors import ConfigError
from asyncrl.learning.losses.base import (
    LossInputs,
    LossOutput,
    NamedLoss,
    importance_ratio,
    loss_output,
    weighted_gradient,
)

__all__ = ["IcePop"]


@dataclass(frozen=True, kw_only=True)
class IcePop(NamedLoss):
    """-sg(M(r)) A logp, M(r) = r for low <= r <= high, else 0 (arXiv 2510.18855; GLM-5, arXiv 2602.15763).

    Bounds on both sides, for either sign of A: what left them is noise of the engines or too old, and not learned from.
    """

    low: float = 0.5
    """Below it a token is masked."""
    high: float = 5.0
    """Above it a token is masked."""
    name: ClassVar[str] = "icepop"
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "masked_frac")

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1:
            raise ConfigError.for_value("loss.low", self.low, "at least 0 and less than 1")
        if not 1 < self.high < float("inf"):
            raise ConfigError.for_value("loss.high", self.high, "a finite number of more than 1")

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``masked_frac`` counts tokens outside of the bounds."""
        ratio = importance_ratio(inputs.logprobs.detach(), inputs.sampled_logprobs)
        keep = (ratio >= self.low) & (ratio <= self.high)
        return loss_output(weighted_gradient(ratio, keep, inputs), inputs, masked_frac=~keep)
