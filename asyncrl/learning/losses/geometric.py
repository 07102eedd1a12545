"""The geometric mean of token ratios (GMPO), each clipped before the mean is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.learning.losses.base import (
    LossInputs,
    LossOutput,
    NamedLoss,
    log_ratio,
    loss_output,
    mean_of_sequence,
    require_positive,
)

__all__ = ["GeometricMean"]


@dataclass(frozen=True, kw_only=True)
class GeometricMean(NamedLoss):
    """-A exp(mean over the sequence of l), l = min(log r, clip_high) for A > 0, max(log r, -clip_low) for A < 0.

    GMPO, arXiv 2507.20673. By token, as in GSPO: the mean is held, and l has the gradient: exp(sg(mean)) * exp(l -
    sg(l)). A token that its clip has reached has none; the others of its sequence keep theirs.
    """

    clip_low: float = 0.4
    """Bound of a token's log-ratio below 0, where the advantage is negative."""
    clip_high: float = 0.4
    """Bound of a token's log-ratio above 0, where the advantage is positive."""
    name: ClassVar[str] = "geometric_mean"
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "clipped_frac", "sequence_ratio")

    def __post_init__(self) -> None:
        require_positive("loss.clip_low", self.clip_low)
        require_positive("loss.clip_high", self.clip_high)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``sequence_ratio`` is the mean of the clipped ratios."""
        raw = log_ratio(inputs.logprobs, inputs.sampled_logprobs)
        clipped = raw.clamp(max=self.clip_high).where(inputs.advantages >= 0, raw.clamp(min=-self.clip_low))
        mean = mean_of_sequence(clipped.detach(), inputs.tokens_B)
        ratio = mean.exp() * (clipped - clipped.detach()).exp()
        reached = clipped.detach() != raw.detach()
        return loss_output(-ratio * inputs.advantages, inputs, clipped_frac=reached, sequence_ratio=ratio)
