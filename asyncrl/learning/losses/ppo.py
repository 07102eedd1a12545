"""Clipped surrogates: PPO, and decoupled PPO with a weight for the age of a token beside its trust region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from asyncrl.learning.losses.base import (
    LossInputs,
    LossOutput,
    NamedLoss,
    Proximal,
    TokenData,
    importance_ratio,
    loss_output,
    require_bounds,
    require_positive,
)

if TYPE_CHECKING:
    import torch

__all__ = ["PPO", "DecoupledPPO"]


@dataclass(frozen=True, kw_only=True)
class PPO(NamedLoss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347), with the sampler's policy as the old one.

    For A < 0 the minimum does not bound a large ratio; the clamp of the log-ratio does, at e^20.
    """

    clip_low: float = 0.2
    """A ratio below 1 - clip_low gives no gradient that lowers it further."""
    clip_high: float = 0.2
    """A ratio above 1 + clip_high gives no gradient that raises it further."""
    name: ClassVar[str] = "ppo"
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "clipped_frac")

    def __post_init__(self) -> None:
        require_bounds(self.clip_low, self.clip_high)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``clipped_frac`` counts tokens whose gradient the clip takes away."""
        ratio = importance_ratio(inputs.logprobs, inputs.sampled_logprobs)
        loss, clipped = _clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        return loss_output(loss, inputs, clipped_frac=clipped)


@dataclass(frozen=True, kw_only=True)
class DecoupledPPO(NamedLoss):
    """-w min(q A, clip(q, ..) A), q = exp(logp - p), w = min(exp(p - mu), cap) (arXiv 2110.00641, 2505.24298).

    ``p`` is the proximal log-probability, of the parameters at the step's start. Staleness goes into the capped
    weight w, the trust region is around p. With one optimizer step for each batch q is 1 and the clip does not bind.
    """

    clip_low: float = 0.2
    """A ratio below 1 - clip_low gives no gradient that lowers it further."""
    clip_high: float = 0.2
    """A ratio above 1 + clip_high gives no gradient that raises it further."""
    max_importance_weight: float = 5.0
    """Cap of the weight that corrects for the age of a token."""
    name: ClassVar[str] = "decoupled_ppo"
    diagnostics: ClassVar[tuple[str, ...]] = (
        "ratio",
        "kl",
        "clipped_frac",
        "behaviour_weight",
        "behaviour_capped_frac",
    )

    def __post_init__(self) -> None:
        require_bounds(self.clip_low, self.clip_high)
        require_positive("loss.max_importance_weight", self.max_importance_weight)

    @property
    def token_data(self) -> tuple[TokenData, ...]:
        """The proximal log-probabilities."""
        return (Proximal(),)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses, and w with how often it was capped."""
        proximal = inputs.data["proximal"]
        behaviour = importance_ratio(proximal, inputs.sampled_logprobs)
        weight = behaviour.clamp(max=self.max_importance_weight)
        ratio = importance_ratio(inputs.logprobs, proximal)
        surrogate, clipped = _clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        return loss_output(
            weight * surrogate,
            inputs,
            clipped_frac=clipped,
            behaviour_weight=weight,
            behaviour_capped_frac=behaviour > self.max_importance_weight,
        )


def _clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return -unclipped.minimum(clipped), clipped < unclipped
