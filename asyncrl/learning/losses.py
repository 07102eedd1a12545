"""Policy losses, one object each, for one trained token.

Symbols: ``logp`` log-probability under the parameters being trained, ``mu`` the same under the policy that sampled
(as the server sent it), ``A`` the advantage, ``r = exp(logp - mu)`` the importance ratio, ``sg`` stop-gradient. All
in float32, on the sampling temperature's scale. A loss is a sum over tokens; weights and divisors are the learner's
and the trainer's.

Log-ratios are clamped before ``exp``: a token that one side thinks impossible gives a large ratio and not infinity.
Padding never gets here, only trained tokens do, so there is no zero times infinity to mask.

Left out: a KL penalty to a reference model and an entropy bonus.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CISPO",
    "PPO",
    "DecoupledPPO",
    "ImportanceSampling",
    "Loss",
    "LossInputs",
    "LossOutput",
    "PolicyGradient",
    "loss_from",
]

_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """(N,) tensors over the trained tokens of a pass."""

    logprobs: torch.Tensor
    """With gradient."""
    sampled_logprobs: torch.Tensor
    advantages: torch.Tensor
    proximal_logprobs: torch.Tensor | None = None
    """Log-probabilities at the step's start, without gradient, for losses with ``needs_proximal``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """(N,) loss of each token with gradient, and (N,) numbers without that are averaged into ``loss/<name>``."""

    loss: torch.Tensor
    diagnostics: Mapping[str, torch.Tensor]


class Loss(Protocol):
    """What ``AsyncTrainer(loss=..)`` takes; any object with these members will do."""

    @property
    def needs_proximal(self) -> bool:
        """True if ``proximal_logprobs`` must be computed before the step."""
        ...

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Names of what ``LossOutput.diagnostics`` holds."""
        ...

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The loss of each trained token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO:
    """-sg(min(r, eps_max)) * A * logp (arXiv 2506.13585): a capped weight, and a gradient for every token."""

    eps_max: float = 6.0
    needs_proximal: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "clipped_frac")

    def __post_init__(self) -> None:
        _require_positive("loss.eps_max", self.eps_max)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """See ``Loss``."""
        ratio = _ratio(inputs.logprobs, inputs.sampled_logprobs).detach()
        loss = -ratio.clamp(max=self.eps_max) * inputs.advantages * inputs.logprobs
        return _output(loss, inputs, clipped=ratio > self.eps_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347), with the sampler's policy as the old one.

    For A < 0 the minimum does not bound a large ratio; the clamp of the log-ratio does, at e^20.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    needs_proximal: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "clipped_frac")

    def __post_init__(self) -> None:
        _require_clip(self.clip_low, self.clip_high)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """See ``Loss``."""
        ratio = _ratio(inputs.logprobs, inputs.sampled_logprobs)
        loss, clipped = _clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        return _output(loss, inputs, clipped=clipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPPO:
    """-w min(q A, clip(q, ..) A), q = exp(logp - p), w = min(exp(p - mu), cap) (arXiv 2110.00641, 2505.24298).

    ``p`` is the proximal log-probability, of the parameters at the step's start. Staleness goes into the capped
    weight w, the trust region is around p. With one optimizer step for each batch q is 1 and the clip does not bind.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    max_importance_weight: float = 5.0
    needs_proximal: ClassVar[bool] = True
    diagnostics: ClassVar[tuple[str, ...]] = (
        "ratio",
        "kl",
        "clipped_frac",
        "behaviour_weight",
        "behaviour_capped_frac",
    )

    def __post_init__(self) -> None:
        _require_clip(self.clip_low, self.clip_high)
        _require_positive("loss.max_importance_weight", self.max_importance_weight)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """See ``Loss``."""
        if inputs.proximal_logprobs is None:
            raise ValueError("DecoupledPPO needs the proximal log-probabilities of the step")
        behaviour = _ratio(inputs.proximal_logprobs, inputs.sampled_logprobs)
        weight = behaviour.clamp(max=self.max_importance_weight)
        ratio = _ratio(inputs.logprobs, inputs.proximal_logprobs)
        surrogate, clipped = _clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        output = _output(weight * surrogate, inputs, clipped=clipped)
        capped = (behaviour > self.max_importance_weight).float()
        extra = {"behaviour_weight": weight, "behaviour_capped_frac": capped}
        return LossOutput(loss=output.loss, diagnostics={**output.diagnostics, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """-r A: unbiased and unbounded; use it with little staleness."""

    needs_proximal: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl")

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """See ``Loss``."""
        ratio = _ratio(inputs.logprobs, inputs.sampled_logprobs)
        return _output(-ratio * inputs.advantages, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """-A logp (REINFORCE): no correction for staleness at all."""

    needs_proximal: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl")

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """See ``Loss``."""
        return _output(-inputs.advantages * inputs.logprobs, inputs)


_BY_NAME: Mapping[str, type[CISPO | PPO | DecoupledPPO | ImportanceSampling | PolicyGradient]] = {
    "cispo": CISPO,
    "ppo": PPO,
    "decoupled_ppo": DecoupledPPO,
    "importance_sampling": ImportanceSampling,
    "policy_gradient": PolicyGradient,
}


def loss_from(loss: str | Loss, /, **options: float) -> Loss:
    """A loss by name with its ``options``, or the object itself; ``ConfigError`` for an unknown name or option."""
    if not isinstance(loss, str):
        if options:
            raise ConfigError(f"loss options {sorted(options)} go into the loss object {loss!r}")
        return loss
    if loss not in _BY_NAME:
        raise ConfigError.for_unknown_key(loss, _BY_NAME, where="loss")
    kind = _BY_NAME[loss]
    known = [field.name for field in dataclasses.fields(kind)]
    for option, value in options.items():
        if option not in known:
            raise ConfigError.for_unknown_key(option, known, where=f"loss {loss!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError.for_value(f"loss.{option}", value, "a number")
    return kind(**options)


def _ratio(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (logprobs - other).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def _clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return -unclipped.minimum(clipped), clipped < unclipped


def _output(loss: torch.Tensor, inputs: LossInputs, *, clipped: torch.Tensor | None = None) -> LossOutput:
    """``ratio``: r; ``kl``: the estimate r - 1 - log r of KL(sampler || learner), which is never negative."""
    ratio = _ratio(inputs.logprobs.detach(), inputs.sampled_logprobs)
    diagnostics = {"ratio": ratio, "kl": ratio - 1 - ratio.log()}
    if clipped is not None:
        diagnostics["clipped_frac"] = clipped.detach().float()
    return LossOutput(loss=loss, diagnostics=diagnostics)


def _require_positive(key: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError.for_value(key, value, "a finite number of more than 0")


def _require_clip(low: float, high: float) -> None:
    if not 0 <= low < 1:
        raise ConfigError.for_value("loss.clip_low", low, "at least 0 and less than 1")
    if not 0 <= high < float("inf"):
        raise ConfigError.for_value("loss.clip_high", high, "at least 0")
