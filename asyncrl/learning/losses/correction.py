"""What is done about tokens and sequences that another policy sampled than the one that is trained.

Beside any loss. A *mask* takes gradients away; a *weight* multiplies them, and a loss with a ratio to the sampler has
such a weight already: both would count the difference twice, which is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from asyncrl.errors import ConfigError, require_choice
from asyncrl.learning.losses.base import LOG_RATIO_LIMIT, mean_of_sequence

if TYPE_CHECKING:
    import torch

__all__ = ["Correction", "Verdict"]

_Action: TypeAlias = Literal["truncate", "mask"]
_SequenceRatio: TypeAlias = Literal["geometric", "product"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """(N,) tensors: what a ``Correction`` says about the trained tokens of a pass."""

    keep: torch.Tensor
    """True for tokens that are trained."""
    weight: torch.Tensor
    """What the loss of those is multiplied by, without gradient."""
    truncated: torch.Tensor
    """True where that weight met a bound."""
    vetoed: torch.Tensor
    """True for the tokens of sequences that were dropped for a single ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Bounds on r = exp(logp - mu), by token and by sequence; nothing is on unless it is set.

    ``truncate`` weighs the gradient by sg(min(max(r, low), high)), truncated importance sampling; ``mask`` gives none
    outside of the bounds. The ratio of a sequence is exp(mean of log r), or exp(sum of log r) if "product" is asked
    for, which leaves every bound in long sequences. ``logp`` is the current policy, or p, the one at the step's start,
    where the loss has asked for it. A ratio that is not a number is masked; a trainer refuses the step that has one.

    Example: ``Correction(token="mask", token_low=0.5, token_high=2.0, veto_low=1e-4)``.
    """

    token: _Action | None = None
    """What is done about single tokens: "truncate", "mask", or nothing."""
    token_low: float = 0.0
    """Their lower bound; 0 is none."""
    token_high: float = 2.0
    """Their upper bound."""
    sequence: _Action | None = None
    """What is done about whole sequences: "truncate", "mask", or nothing."""
    sequence_ratio: _SequenceRatio = "geometric"
    """The ratio of a sequence: "geometric", the mean of its tokens' log-ratios, or "product", their sum."""
    sequence_low: float = 0.0
    """Its lower bound; strict ones of a geometric mean are 0.99 and 1.01."""
    sequence_high: float = 2.0
    """Its upper bound."""
    veto_low: float = 0.0
    """A sequence with one ratio below it is not trained at all, such as 1e-4; 0 is no veto."""
    veto_high: float = float("inf")
    """The same for one above it, such as 100."""

    def __post_init__(self) -> None:
        for key in ("token", "sequence"):
            if getattr(self, key) is not None:
                require_choice(f"correction.{key}", getattr(self, key), _Action)
        require_choice("correction.sequence_ratio", self.sequence_ratio, _SequenceRatio)
        for key in ("token", "sequence", "veto"):
            low, high = getattr(self, f"{key}_low"), getattr(self, f"{key}_high")
            if not 0 <= low < 1:
                raise ConfigError.for_value(f"correction.{key}_low", low, "at least 0 and less than 1")
            if not high > 1:
                raise ConfigError.for_value(f"correction.{key}_high", high, "more than 1")
        if self.token == "truncate" and self.sequence == "truncate":
            raise ConfigError(
                "correction.token and correction.sequence are both 'truncate': a sequence's weight is made of its "
                "tokens' ratios, which would count twice; use 'mask' for one of them"
            )

    @property
    def weighs(self) -> bool:
        """True if it multiplies gradients by a ratio."""
        return "truncate" in (self.token, self.sequence)

    def judge(self, log_ratios: torch.Tensor, tokens_B: Sequence[int]) -> Verdict:
        """What becomes of (N,) tokens with these log-ratios, which are clamped and have no gradient."""
        ratio, of_sequence = log_ratios.exp(), self._sequence_ratio(log_ratios, tokens_B)
        outside = (ratio < self.veto_low) | (ratio > self.veto_high)
        vetoed = mean_of_sequence(outside.float(), tokens_B) > 0
        keep, weight = ~(vetoed | ratio.isnan()), ratio.new_ones(()).expand_as(ratio)
        truncated = keep & False
        for action, values, low, high in (
            (self.token, ratio, self.token_low, self.token_high),
            (self.sequence, of_sequence, self.sequence_low, self.sequence_high),
        ):
            if action == "mask":
                keep = keep & _within(values, low, high)
            elif action == "truncate":
                weight, truncated = values.clamp(low, high), ~_within(values, low, high)
        keep = keep & ~weight.isnan()
        return Verdict(keep=keep, weight=weight, truncated=truncated & keep, vetoed=vetoed)

    def _sequence_ratio(self, log_ratios: torch.Tensor, tokens_B: Sequence[int]) -> torch.Tensor:
        mean = mean_of_sequence(log_ratios, tokens_B)
        if self.sequence_ratio == "product":
            lengths = log_ratios.new_tensor(list(tokens_B)).repeat_interleave(log_ratios.new_tensor(tokens_B).long())
            mean = (mean * lengths).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return mean.exp()


def _within(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """What is not a number is not within any bounds."""
    return (values >= low) & (values <= high)
