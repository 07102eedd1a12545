"""GSPO: one ratio for a whole sequence."""

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
    require_clip,
)
from asyncrl.learning.losses.ppo import clipped_surrogate

__all__ = ["GSPO"]


@dataclass(frozen=True, kw_only=True)
class GSPO(NamedLoss):
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = sg(exp(mean of logp - mu)) * pi / sg(pi).

    arXiv 2507.18071, in its form by token; the mean is over the sequence. The gradient is that of its form by sequence
    where a sequence has one advantage. All tokens of a sequence are clipped, or none. The paper counts sequences alike:
    normalize="sequence".
    """

    clip_low: float = 3e-4
    """Mean ratios are close to 1, and so are the bounds; data of several versions ago needs wider ones."""
    clip_high: float = 4e-4
    """The bound above 1."""
    name: ClassVar[str] = "gspo"
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "clipped_frac", "sequence_ratio")

    def __post_init__(self) -> None:
        require_clip(self.clip_low, self.clip_high)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``sequence_ratio`` is s, ``clipped_frac`` counts tokens of clipped sequences."""
        logprobs = inputs.logprobs
        mean = mean_of_sequence(log_ratio(logprobs, inputs.sampled_logprobs).detach(), inputs.tokens_B)
        ratio = mean.exp() * (logprobs - logprobs.detach()).exp()
        surrogate, clipped = clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        return loss_output(-surrogate, inputs, clipped_frac=clipped, sequence_ratio=ratio)
