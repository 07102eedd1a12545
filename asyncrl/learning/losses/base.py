"""What a loss is: what it gets of a pass, what it returns, and what it may ask the model for before a step.

Symbols, in all files here: ``logp`` log-probability under the parameters being trained, ``mu`` the same under the
policy that sampled (as the server sent it), ``p`` the same at the step's start, ``A`` the advantage,
``r = exp(logp - mu)`` the importance ratio, ``sg`` stop-gradient. All in float32, on the sampling temperature's scale.

Log-ratios are clamped before ``exp``: a token that one side thinks impossible gives a large ratio and not infinity.
Padding never gets here, only trained tokens do, so there is no zero times infinity to mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from asyncrl.errors import ConfigError
from asyncrl.learning.base import TrainingSequence

if TYPE_CHECKING:
    import torch

__all__ = [
    "LOG_RATIO_LIMIT",
    "Loss",
    "LossInputs",
    "LossOutput",
    "NamedLoss",
    "Proximal",
    "Reference",
    "ScoringModel",
    "TokenData",
    "importance_ratio",
    "log_ratio",
    "loss_output",
    "mean_of_sequence",
    "require_clip",
    "require_positive",
    "weighted_gradient",
]

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 4.9e8: far beyond every bound, and far from infinity."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """(N,) tensors over the trained tokens of a pass, which are whole sequences, one after the other."""

    logprobs: torch.Tensor
    """With gradient."""
    sampled_logprobs: torch.Tensor
    advantages: torch.Tensor
    ages: torch.Tensor
    """Version at the step's start minus the version that sampled the token."""
    tokens_B: Sequence[int] = ()
    """Trained tokens of each sequence, N together, for losses that look at sequences: ``logprobs.split(tokens_B)``."""
    updates: int = 0
    """Optimizer steps that were taken since the step's start: 0 for the first minibatch."""
    data: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the loss asked for in ``token_data``, by name; without gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """(N,) loss of each token with gradient, and (N,) numbers without that are averaged into ``loss/<name>``."""

    loss: torch.Tensor
    diagnostics: Mapping[str, torch.Tensor]

    def require_one_each(self, tokens: int) -> None:
        """Raise ``ConfigError`` for a tensor that is not (``tokens``,): broadcasting would make a wrong sum of it."""
        for name, values in {"loss": self.loss, **self.diagnostics}.items():
            if tuple(values.shape) != (tokens,):
                key, allowed = f"the shape of the loss's {name!r}", f"({tokens},), a value for each trained token"
                raise ConfigError.for_value(key, tuple(values.shape), allowed)


class ScoringModel(Protocol):
    """What ``TokenData`` sees of the learner's model."""

    @property
    def path(self) -> Path:
        """The model folder that training began from."""
        ...

    def logprobs(self, sequences: Sequence[TrainingSequence], *, adapter: bool = True) -> list[torch.Tensor]:
        """Log-probabilities of the trained tokens: one (tokens,) float32 tensor for each sequence, without gradient.

        With ``adapter=False`` those of the model in ``path``: the adapter is switched off, also one that training began
        from, or, if all weights are trained, a frozen copy of them is loaded when this is first asked for.
        """
        ...


class TokenData(Protocol):
    """A number for each trained token that a loss asks for: ``Proximal`` and ``Reference``, or a teacher of one's own.

    Example: ``class Teacher`` with ``name = "teacher"`` and a ``compute`` that asks another model; a loss with
    ``token_data = (Teacher(),)`` then finds its numbers in ``LossInputs.data["teacher"]``.
    """

    @property
    def name(self) -> str:
        """The key in ``LossInputs.data``."""
        ...

    def compute(self, model: ScoringModel, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """One (trained tokens,) float32 tensor for each sequence. Called once a step, before its first update."""
        ...


@dataclass(frozen=True, slots=True)
class Proximal:
    """Log-probabilities under the parameters at the step's start."""

    name: ClassVar[str] = "proximal"

    def compute(self, model: ScoringModel, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """Of the model as it is now."""
        return model.logprobs(sequences)


@dataclass(frozen=True, slots=True)
class Reference:
    """Log-probabilities under the model that training began from."""

    name: ClassVar[str] = "reference"

    def compute(self, model: ScoringModel, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """Of the model without what was trained since."""
        return model.logprobs(sequences, adapter=False)


class Loss(Protocol):
    """What ``AsyncTrainer(loss=..)`` takes; any object with these members will do.

    One with a weight or ratio to the sampler of its own says so by ``corrects_sampling = True``: then a ``Correction``
    that weighs is refused beside it.
    """

    @property
    def token_data(self) -> tuple[TokenData, ...]:
        """What must be computed for each trained token before the step; mostly nothing."""
        ...

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Names of what ``LossOutput.diagnostics`` holds."""
        ...

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The loss of each trained token."""
        ...


@dataclass(frozen=True, kw_only=True)
class NamedLoss(ABC):
    """A loss that can be asked for by ``name``, see ``choosing``."""

    name: ClassVar[str]
    corrects_sampling: ClassVar[bool] = True
    """True if a weight or ratio of its own makes up for what was sampled by another policy than the trained one."""
    diagnostics: ClassVar[tuple[str, ...]] = ("ratio", "kl")

    @property
    def token_data(self) -> tuple[TokenData, ...]:
        """What must be computed for each trained token before the step."""
        return ()

    @abstractmethod
    def per_token(self, inputs: LossInputs) -> LossOutput:
        """The loss of each trained token."""


def log_ratio(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """logprobs - other, between -20 and 20."""
    return (logprobs - other).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_ratio(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """exp(logprobs - other), between e^-20 and e^20."""
    return log_ratio(logprobs, other).exp()


def mean_of_sequence(values: torch.Tensor, tokens_B: Sequence[int]) -> torch.Tensor:
    """(N,) for each token the mean of its sequence's values. Not a sum: long sequences would leave every bound."""
    import torch

    means = [part.mean().expand(len(part)) for part in values.split(list(tokens_B))]
    return torch.cat([values[:0], *means])


def weighted_gradient(weight: torch.Tensor, keep: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """-sg(weight) A logp where ``keep`` is True, else 0; what is not a number elsewhere reaches no gradient."""
    kept = weight.detach().where(keep, 0.0)
    return -kept * inputs.advantages * inputs.logprobs.where(keep, 0.0)


def loss_output(loss: torch.Tensor, inputs: LossInputs, **more: torch.Tensor) -> LossOutput:
    """``ratio``: r; ``kl``: the estimate r - 1 - log r of KL(sampler || learner), which is never negative."""
    ratio = importance_ratio(inputs.logprobs.detach(), inputs.sampled_logprobs)
    diagnostics = {name: values.detach().float() for name, values in more.items()}
    return LossOutput(loss=loss, diagnostics={"ratio": ratio, "kl": ratio - 1 - ratio.log(), **diagnostics})


def require_positive(key: str, value: float) -> None:
    """Refuse what is not a finite number of more than 0."""
    if not 0 < value < float("inf"):
        raise ConfigError.for_value(key, value, "a finite number of more than 0")


def require_clip(low: float, high: float) -> None:
    """Refuse a ``clip_low`` or ``clip_high`` that no ratio has."""
    if not 0 <= low < 1:
        raise ConfigError.for_value("loss.clip_low", low, "at least 0 and less than 1")
    if not 0 <= high < float("inf"):
        raise ConfigError.for_value("loss.clip_high", high, "at least 0")
