"""DPPO: a trust region of probabilities and not of ratios, which say little about rare tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from asyncrl.errors import require_choice
from asyncrl.learning.losses.base import (
    LossInputs,
    LossOutput,
    NamedLoss,
    importance_ratio,
    loss_output,
    require_positive,
    weighted_gradient,
)

if TYPE_CHECKING:
    import torch

__all__ = ["DPPO"]

_Divergence: TypeAlias = Literal["tv", "kl"]
_DELTAS = {"tv": 0.2, "kl": 0.05}
_LEAST_LOGPROB = -80.0
_MOST_PROBABILITY = 1.0 - 1e-6


@dataclass(frozen=True, kw_only=True)
class DPPO(NamedLoss):
    """-M sg(min(r, eps_max)) A logp, M = 0 where D(mu || pi) > delta and the gradient would lead further away, else 1.

    arXiv 2602.04879, binary form: D is between "this token" and "any other one". With P = exp(logp), Q = exp(mu):
    tv is |P - Q|, kl is Q log(Q / P) + (1 - Q) log((1 - Q) / (1 - P)). Away is P > Q for A > 0, and P < Q for A < 0.
    """

    divergence: _Divergence = "tv"
    """What is bounded: the total variation ("tv"), or the Kullback-Leibler divergence ("kl")."""
    delta: float | None = None
    """The bound; not set: 0.2 for "tv", 0.05 for "kl"."""
    eps_max: float = 20.0
    """Cap of the importance ratio that weighs the gradient."""
    name: ClassVar[str] = "dppo"
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "masked_frac", "divergence")

    def __post_init__(self) -> None:
        require_choice("loss.divergence", self.divergence, _Divergence)
        require_positive("loss.eps_max", self.eps_max)
        if self.delta is not None:
            require_positive("loss.delta", self.delta)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``masked_frac`` counts tokens without gradient, ``divergence`` is D."""
        logprobs, sampled = inputs.logprobs.detach(), inputs.sampled_logprobs
        divergence = _total_variation(logprobs, sampled) if self.divergence == "tv" else _kl(logprobs, sampled)
        nearer = (logprobs <= sampled).where(inputs.advantages > 0, logprobs >= sampled)
        keep = (divergence <= (_DELTAS[self.divergence] if self.delta is None else self.delta)) | nearer
        weight = importance_ratio(logprobs, sampled).clamp(max=self.eps_max)
        loss = weighted_gradient(weight, keep, inputs)
        return loss_output(loss, inputs, masked_frac=~keep, divergence=divergence)


def _total_variation(logprobs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    return (logprobs.exp() - sampled.exp()).abs()


def _kl(logprobs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    log_p, log_q = logprobs.clamp(_LEAST_LOGPROB, 0.0), sampled.clamp(_LEAST_LOGPROB, 0.0)
    p, q = log_p.exp().clamp(max=_MOST_PROBABILITY), log_q.exp().clamp(max=_MOST_PROBABILITY)
    return q * (log_q - log_p) + (1 - q) * ((-q).log1p() - (-p).log1p())
