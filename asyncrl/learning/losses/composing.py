"""One loss of a policy loss, an off-policy correction and a KL penalty, in this order of composition:

    advantages less the penalty in the reward -> tokens that the correction masks are taken out -> the policy loss of
    the others, times the correction's weight -> plus the penalty in the loss

A masked token is not seen by the policy loss at all: it is in no sequence's ratio, and nothing of it, also no number
that is none, reaches a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError
from asyncrl.learning.losses.base import (
    Loss,
    LossInputs,
    LossOutput,
    Reference,
    TokenData,
    log_ratio,
    loss_output,
)
from asyncrl.learning.losses.correction import Correction
from asyncrl.learning.losses.kl import KLPenalty

if TYPE_CHECKING:
    import torch

__all__ = ["ComposedLoss", "compose"]


def compose(loss: Loss, *, correction: Correction | None, kl: KLPenalty | None) -> Loss:
    """The loss itself, or with what is set beside it; ``ConfigError`` for a difference that would count twice."""
    if correction is None and kl is None:
        return loss
    return ComposedLoss(loss=loss, correction=correction, kl=kl)


@dataclass(frozen=True, kw_only=True)
class ComposedLoss:
    """A ``Loss`` made of up to three; see above."""

    loss: Loss
    correction: Correction | None = None
    kl: KLPenalty | None = None

    def __post_init__(self) -> None:
        if self.correction is not None and self.correction.weighs and getattr(self.loss, "corrects_sampling", False):
            raise ConfigError(
                f"correction is {self.correction!r}, which weighs tokens by their ratio to the sampler, and the loss "
                f"{self.loss!r} has such a ratio of its own: the difference would count twice. Use 'mask' in the "
                "correction, or loss='policy_gradient'"
            )

    @property
    def token_data(self) -> tuple[TokenData, ...]:
        """What the policy loss asks for, and the reference if there is a penalty."""
        asked = self.loss.token_data
        known = {data.name for data in asked}
        return asked if self.kl is None or Reference.name in known else (*asked, Reference())

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Those of the policy loss, and what was masked, truncated, vetoed and penalised."""
        correction = () if self.correction is None else ("masked_frac", "truncated_frac", "vetoed_frac")
        kl = () if self.kl is None else ("reference_kl",)
        return tuple(dict.fromkeys((*self.loss.diagnostics, *correction, *kl)))

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """(N,) losses; those of masked tokens are 0."""
        if self.correction is None:
            return self._of_kept(inputs, None)
        behind = inputs.data.get("proximal", inputs.logprobs.detach())
        verdict = self.correction.judge(log_ratio(behind, inputs.sampled_logprobs), inputs.tokens_B)
        keep = verdict.keep
        kept = self._of_kept(_selected(inputs, keep), verdict.weight[keep])
        whole = loss_output(_placed(kept.loss, keep), inputs)
        own = {name: _placed(values, keep) for name, values in kept.diagnostics.items()}
        everywhere = {name: values for name, values in whole.diagnostics.items() if name in own}
        beside = {
            "masked_frac": own.get("masked_frac", 0) + (~keep).float(),
            "truncated_frac": verdict.truncated.float(),
            "vetoed_frac": verdict.vetoed.float(),
        }
        return LossOutput(loss=whole.loss, diagnostics=own | everywhere | beside)

    def _of_kept(self, inputs: LossInputs, weight: torch.Tensor | None) -> LossOutput:
        if self.kl is not None:
            inputs = replace(inputs, advantages=self.kl.shaped(inputs))
        output = self.loss.per_token(inputs)
        loss = output.loss if weight is None else weight * output.loss
        if self.kl is None:
            return LossOutput(loss=loss, diagnostics=output.diagnostics)
        penalty = self.kl.loss(inputs)
        return LossOutput(
            loss=loss if penalty is None else loss + penalty,
            diagnostics={**output.diagnostics, "reference_kl": self.kl.estimate(inputs).detach()},
        )


def _selected(inputs: LossInputs, keep: torch.Tensor) -> LossInputs:
    """The same without the tokens that are not kept; sequences of which none is are gone."""
    counts_B = [int(part.sum()) for part in keep.split(list(inputs.tokens_B))]
    return LossInputs(
        logprobs=inputs.logprobs[keep],
        sampled_logprobs=inputs.sampled_logprobs[keep],
        advantages=inputs.advantages[keep],
        ages=inputs.ages[keep],
        tokens_B=[count for count in counts_B if count],
        updates=inputs.updates,
        data={name: values[keep] for name, values in inputs.data.items()},
    )


def _placed(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """(N,) the values at their tokens, 0 elsewhere."""
    return values.new_zeros(len(keep)).masked_scatter(keep, values)
