"""A penalty on the distance to the model that training began from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from asyncrl.errors import ConfigError, require_choice
from asyncrl.learning.losses.base import LossInputs, importance_ratio, log_ratio, require_positive

if TYPE_CHECKING:
    import torch

__all__ = ["KLPenalty"]

_Kind: TypeAlias = Literal["k1", "k2", "k3"]
_Where: TypeAlias = Literal["loss", "reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KLPenalty:
    """coefficient * KL(pi || reference), estimated at each trained token from d = logp - log reference.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (never negative, and it varies less).

    In the reward, k is subtracted from the token's advantage, without gradient; only k1 is unbiased there (arXiv
    2512.21852). In the loss, the gradient of a plain estimate is not the gradient of what it estimates: that of k1 is 0
    on average, that of k3 is another divergence's (arXiv 2506.09477). So there it is weighted by the importance ratio
    to the sampler, w = min(r, max_importance_weight): k1 and k3 as w k(d) with the gradient through both, k2 as sg(w)
    k2(d). Each is then, below the cap, an unbiased gradient of the token's KL. What a token does to the KL of later
    tokens is left out.

    The reference is computed once a step by one forward pass, with the adapter switched off, or with a frozen copy of
    the first weights. Trajectories without an advantage, such as those of groups whose rewards are all the same, are
    not trained, and so not pulled to the reference either.
    """

    coefficient: float
    """0 only measures the distance (``loss/reference_kl``)."""
    kind: _Kind = "k3"
    """The estimate: "k1", "k2" or "k3"."""
    where: _Where = "loss"
    """Where it is counted: "loss", with a gradient of its own, or "reward"."""
    max_importance_weight: float = 5.0
    """Cap of w, in the loss."""

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient < float("inf"):
            raise ConfigError.for_value("kl.coefficient", self.coefficient, "a finite number of at least 0")
        require_choice("kl.kind", self.kind, _Kind)
        require_choice("kl.where", self.where, _Where)
        require_positive("kl.max_importance_weight", self.max_importance_weight)

    def estimate(self, inputs: LossInputs) -> torch.Tensor:
        """(N,) k, with gradient."""
        d = log_ratio(inputs.logprobs, inputs.data["reference"])
        if self.kind == "k1":
            return d
        return d.square() / 2 if self.kind == "k2" else (-d).expm1() + d

    def shaped(self, inputs: LossInputs) -> torch.Tensor:
        """(N,) the advantages, less the penalty if it is counted in the reward."""
        if self.where == "loss":
            return inputs.advantages
        return inputs.advantages - self.coefficient * self.estimate(inputs).detach()

    def loss(self, inputs: LossInputs) -> torch.Tensor | None:
        """(N,) what is added to the loss of each token; None if it is counted in the reward."""
        if self.where == "reward":
            return None
        weight = importance_ratio(inputs.logprobs, inputs.sampled_logprobs).clamp(max=self.max_importance_weight)
        if self.kind == "k2":
            weight = weight.detach()
        return self.coefficient * weight * self.estimate(inputs)
