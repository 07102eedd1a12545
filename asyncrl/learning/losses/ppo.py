"""Clipped surrogates: PPO, and decoupled PPO with a weight for the age of a token beside its trust region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from asyncrl.errors import ConfigError, require_choice
from asyncrl.learning.losses.base import (
    LossInputs,
    LossOutput,
    NamedLoss,
    Proximal,
    TokenData,
    importance_ratio,
    log_ratio,
    loss_output,
    require_clip,
    require_positive,
)

if TYPE_CHECKING:
    import torch

__all__ = ["PPO", "DecoupledPPO", "clipped_surrogate"]

_Proximal: TypeAlias = Literal["recompute", "loglinear"]


@dataclass(frozen=True, kw_only=True)
class PPO(NamedLoss):
    """-S, S = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 max(S, dual_clip A).

    arXiv 1707.06347, and 1912.09729 for the second clip: for A < 0 the minimum alone does not bound a large ratio. The
    old policy is the sampler's: with one update for each batch there is no other. The gradient goes through r.
    """

    clip_low: float = 0.2
    """A ratio below 1 - clip_low gives no gradient that lowers it further."""
    clip_high: float = 0.2
    """A ratio above 1 + clip_high gives no gradient that raises it further; DAPO (arXiv 2503.14476) takes 0.28."""
    dual_clip: float = 3.0
    """A ratio above it gives no gradient where the advantage is negative; ``inf`` for PPO as it was first described."""
    name: ClassVar[str] = "ppo"
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "clipped_frac")

    def __post_init__(self) -> None:
        require_clip(self.clip_low, self.clip_high)
        if not self.dual_clip > 1:
            raise ConfigError.for_value("loss.dual_clip", self.dual_clip, "more than 1")

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``clipped_frac`` counts tokens whose gradient a clip takes away."""
        ratio = importance_ratio(inputs.logprobs, inputs.sampled_logprobs)
        advantages = inputs.advantages
        surrogate, clipped = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        bound = (self.dual_clip * advantages).masked_fill(advantages >= 0, -float("inf"))
        return loss_output(-surrogate.maximum(bound), inputs, clipped_frac=clipped | (surrogate < bound))


@dataclass(frozen=True, kw_only=True)
class DecoupledPPO(NamedLoss):
    """-w min(q A, clip(q, ..) A), q = exp(logp - p), w = sg(min(exp(p - mu), cap)) (arXiv 2110.00641, 2505.24298).

    ``p`` is the proximal log-probability, of the parameters at the step's start. Staleness goes into the capped
    weight w, the trust region is around p. With one optimizer step for each batch q is 1 and the clip does not bind.
    """

    clip_low: float = 0.2
    """A ratio below 1 - clip_low gives no gradient that lowers it further."""
    clip_high: float = 0.2
    """A ratio above 1 + clip_high gives no gradient that raises it further."""
    max_importance_weight: float = 5.0
    """Cap of the weight that corrects for the age of a token."""
    proximal: _Proximal = "recompute"
    """How p is known: "recompute" by a forward pass at the step's start; "loglinear" without one, between mu and the
    current policy, as far as the token's version is from each (arXiv 2512.06547)."""
    name: ClassVar[str] = "decoupled_ppo"
    diagnostics: ClassVar[tuple[str, ...]] = (
        "ratio",
        "kl",
        "clipped_frac",
        "behaviour_weight",
        "behaviour_capped_frac",
    )

    def __post_init__(self) -> None:
        require_clip(self.clip_low, self.clip_high)
        require_positive("loss.max_importance_weight", self.max_importance_weight)
        require_choice("loss.proximal", self.proximal, _Proximal)

    @property
    def token_data(self) -> tuple[TokenData, ...]:
        """The proximal log-probabilities, if they are computed."""
        return (Proximal(),) if self.proximal == "recompute" else ()

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses, and w with how often it was capped."""
        log_behaviour, log_q = self._log_ratios(inputs)
        behaviour = log_behaviour.exp()
        weight = behaviour.clamp(max=self.max_importance_weight)
        surrogate, clipped = clipped_surrogate(log_q.exp(), inputs.advantages, self.clip_low, self.clip_high)
        return loss_output(
            -weight * surrogate,
            inputs,
            clipped_frac=clipped,
            behaviour_weight=weight,
            behaviour_capped_frac=behaviour > self.max_importance_weight,
        )

    def _log_ratios(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """p - mu without gradient, and logp - p with the gradient of logp.

        By versions, v_mu <= v_p <= v: p = mu + alpha (sg(logp) - mu), alpha = (v_p - v_mu) / (v - v_mu), where p's
        version is the step's start: v_p - v_mu is the token's age, and v - v_p the updates since.
        """
        if self.proximal == "recompute":
            proximal = inputs.data["proximal"]
            return log_ratio(proximal, inputs.sampled_logprobs), log_ratio(inputs.logprobs, proximal)
        whole = log_ratio(inputs.logprobs, inputs.sampled_logprobs)
        ages = inputs.ages.to(whole.dtype)
        alpha = (ages / (ages + inputs.updates)).nan_to_num(1.0)  # 0 / 0: all three are one policy
        behind = alpha * whole.detach()
        return behind, whole - behind


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(ratio A, clip(ratio, 1 - low, 1 + high) A), and where the clip takes the gradient away."""
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return unclipped.minimum(clipped), clipped < unclipped
