"""Policy losses, one class each, for one trained token; and what their sum over a step is divided by.

Symbols: ``logp`` log-probability under the parameters being trained, ``mu`` the same under the policy that sampled
(as the server sent it), ``A`` the advantage, ``r = exp(logp - mu)`` the importance ratio, ``sg`` stop-gradient. All
in float32, on the sampling temperature's scale. A new loss is one more class here, with its ``name``.

Log-ratios are clamped before ``exp``: a token that one side thinks impossible gives a large ratio and not infinity.
Padding never gets here, only trained tokens do, so there is no zero times infinity to mask.

The divisor has a part that is known for each trajectory at once, its tokens' weight, and one that is known only when
the batch is complete. So chunks can be trained early, and the global part is divided out once, before the optimizer
step. With T tokens of a trajectory that are trained, zero advantages included, and trajectories with T = 0 not counted:

    normalize   weight of each token        divisor of the step
    token       1                           sum of T
    sequence    1 / T                       number of trajectories
    prompt      1 / (sum of T in its group) number of groups
    batch       1                           number of trajectories
    sum         1                           1

Tokens of trajectories whose group has no variance count: a batch without signal makes a smaller step, not a noisier
one.

Left out: a KL penalty to a reference model and an entropy bonus.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CISPO",
    "PPO",
    "DecoupledPPO",
    "Divisor",
    "ImportanceSampling",
    "Loss",
    "LossInputs",
    "LossOutput",
    "Normalize",
    "PolicyGradient",
    "loss_from",
    "loss_kinds",
    "token_weight",
]

Normalize: TypeAlias = Literal["token", "sequence", "prompt", "batch", "sum"]
_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """(N,) tensors over the trained tokens of a pass, which are whole sequences, one after the other."""

    logprobs: torch.Tensor
    """With gradient."""
    sampled_logprobs: torch.Tensor
    advantages: torch.Tensor
    proximal_logprobs: torch.Tensor | None = None
    """Log-probabilities at the step's start, without gradient, for losses with ``needs_proximal``."""
    tokens_B: Sequence[int] = ()
    """Trained tokens of each sequence, N together, for losses that look at sequences: ``logprobs.split(tokens_B)``."""


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


@dataclass(frozen=True, kw_only=True)
class _NamedLoss(ABC):
    """A loss that can be asked for by ``name``: every class that derives from this one directly."""

    name: ClassVar[str]
    needs_proximal: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl")

    @abstractmethod
    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The loss of each trained token."""


@dataclass(frozen=True, kw_only=True)
class CISPO(_NamedLoss):
    """-sg(min(r, eps_max)) * A * logp (arXiv 2506.13585): a capped weight, and a gradient for every token."""

    eps_max: float = 6.0
    """Cap of the importance ratio; only a token that became much likelier since it was sampled reaches it."""
    name: ClassVar[str] = "cispo"
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl", "clipped_frac")

    def __post_init__(self) -> None:
        _require_positive("loss.eps_max", self.eps_max)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``clipped_frac`` counts ratios above ``eps_max``."""
        ratio = _ratio(inputs.logprobs, inputs.sampled_logprobs).detach()
        loss = -ratio.clamp(max=self.eps_max) * inputs.advantages * inputs.logprobs
        return _output(loss, inputs, clipped_frac=ratio > self.eps_max)


@dataclass(frozen=True, kw_only=True)
class PPO(_NamedLoss):
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
        _require_clip(self.clip_low, self.clip_high)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; ``clipped_frac`` counts tokens whose gradient the clip takes away."""
        ratio = _ratio(inputs.logprobs, inputs.sampled_logprobs)
        loss, clipped = _clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        return _output(loss, inputs, clipped_frac=clipped)


@dataclass(frozen=True, kw_only=True)
class DecoupledPPO(_NamedLoss):
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
        """(N,) losses, and w with how often it was capped; ``ValueError`` without proximal log-probabilities."""
        if inputs.proximal_logprobs is None:
            raise ValueError("DecoupledPPO needs the proximal log-probabilities of the step")
        behaviour = _ratio(inputs.proximal_logprobs, inputs.sampled_logprobs)
        weight = behaviour.clamp(max=self.max_importance_weight)
        ratio = _ratio(inputs.logprobs, inputs.proximal_logprobs)
        surrogate, clipped = _clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        return _output(
            weight * surrogate,
            inputs,
            clipped_frac=clipped,
            behaviour_weight=weight,
            behaviour_capped_frac=behaviour > self.max_importance_weight,
        )


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(_NamedLoss):
    """-r A: unbiased and unbounded; use it with little staleness."""

    name: ClassVar[str] = "importance_sampling"

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses, whose gradient goes through the ratio."""
        ratio = _ratio(inputs.logprobs, inputs.sampled_logprobs)
        return _output(-ratio * inputs.advantages, inputs)


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(_NamedLoss):
    """-A logp (REINFORCE): no correction for staleness at all."""

    name: ClassVar[str] = "policy_gradient"

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses."""
        return _output(-inputs.advantages * inputs.logprobs, inputs)


def loss_kinds() -> dict[str, type[CISPO | PPO | DecoupledPPO | ImportanceSampling | PolicyGradient]]:
    """The losses that can be asked for by name."""
    return {kind.name: kind for kind in (CISPO, PPO, DecoupledPPO, ImportanceSampling, PolicyGradient)}


def loss_from(loss: str | Loss, **options: float) -> Loss:
    """A loss by name with its ``options``, or the object itself; ``ConfigError`` for an unknown name or option."""
    if not isinstance(loss, str):
        if options:
            raise ConfigError(f"loss options {sorted(options)} go into the loss object {loss!r}")
        return loss
    kinds = loss_kinds()
    if loss not in kinds:
        raise ConfigError.for_unknown_key(loss, kinds, where="loss")
    kind = kinds[loss]
    known = [field.name for field in dataclasses.fields(kind)]
    for option, value in options.items():
        if option not in known:
            raise ConfigError.for_unknown_key(option, known, where=f"loss {loss!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError.for_value(f"loss.{option}", value, "a number")
    return kind(**options)


def token_weight(mode: Normalize, *, tokens: int, group_tokens: int) -> float:
    """Weight of each trained token of a trajectory with ``tokens`` in a group with ``group_tokens``, both positive."""
    if mode == "sequence":
        return 1.0 / tokens
    if mode == "prompt":
        return 1.0 / group_tokens
    return 1.0


class Divisor:
    """Owns the global part of the divisor while the groups of a step come in, in any order.

    Example: groups with token counts (10, 30) and (20, 20) have the divisor 80 by token, 4 by sequence, 2 by prompt.
    """

    def __init__(self, mode: Normalize) -> None:
        self._mode = mode
        self.tokens = 0
        """Trained tokens so far."""
        self.trajectories = 0
        """Trajectories with at least one."""
        self._groups = 0

    def add(self, tokens_G: Sequence[int]) -> None:
        """Count a group by its members' trained tokens."""
        self.tokens += sum(tokens_G)
        self.trajectories += sum(tokens > 0 for tokens in tokens_G)
        self._groups += any(tokens > 0 for tokens in tokens_G)

    @property
    def value(self) -> float:
        """The divisor; at least 1, so that an empty batch divides nothing by zero."""
        counts = {
            "token": self.tokens,
            "sequence": self.trajectories,
            "batch": self.trajectories,
            "prompt": self._groups,
            "sum": 1,
        }
        return float(max(1, counts[self._mode]))


def _ratio(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (logprobs - other).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def _clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return -unclipped.minimum(clipped), clipped < unclipped


def _output(loss: torch.Tensor, inputs: LossInputs, **more: torch.Tensor) -> LossOutput:
    """``ratio``: r; ``kl``: the estimate r - 1 - log r of KL(sampler || learner), which is never negative."""
    ratio = _ratio(inputs.logprobs.detach(), inputs.sampled_logprobs)
    diagnostics = {name: values.detach().float() for name, values in more.items()}
    return LossOutput(loss=loss, diagnostics={"ratio": ratio, "kl": ratio - 1 - ratio.log(), **diagnostics})


def _require_positive(key: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError.for_value(key, value, "a finite number of more than 0")


def _require_clip(low: float, high: float) -> None:
    if not 0 <= low < 1:
        raise ConfigError.for_value("loss.clip_low", low, "at least 0 and less than 1")
    if not 0 <= high < float("inf"):
        raise ConfigError.for_value("loss.clip_high", high, "at least 0")
