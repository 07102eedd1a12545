"""Plain transformers: padded batches of eight sequences in the order in which they come, in float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.learners.contestant import Pass
from benchmarks.learners.workloads import Sample

__all__ = ["CAP", "Anchor", "Eager", "Keep", "Padded", "load", "padded"]

CAP = 6.0
"""Largest importance ratio of the loss, which is CISPO's (arXiv 2506.13585)."""
_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Padded:
    """A batch with prompts padded on the left to P tokens, and what is after them on the right to A tokens."""

    ids: torch.Tensor
    """(B, P + A)"""
    attention: torch.Tensor
    """(B, P + A) 1 for tokens, 0 for padding."""
    prompt: int
    """P"""
    trained: torch.Tensor
    """(B, A) 1 for tokens that are trained."""
    logprobs: torch.Tensor
    """(B, A) the sampler's."""
    advantages: torch.Tensor
    """(B,)"""

    @property
    def answers(self) -> torch.Tensor:
        """(B, A) the tokens after the prompts."""
        return self.ids[:, self.prompt :]


def padded(sequences: Sequence[Sample]) -> Iterator[Padded]:
    """Batches of eight."""
    for first in range(0, len(sequences), _ROWS):
        part = sequences[first : first + _ROWS]
        before = max(one.prompt for one in part)
        after = max(len(one.tokens) - one.prompt for one in part)
        ids, attention, trained = (np.zeros((len(part), before + after), dtype=np.int64) for _ in range(3))
        logprobs = np.zeros((len(part), before + after), dtype=np.float32)
        for row, one in enumerate(part):
            place = slice(before - one.prompt, before - one.prompt + len(one.tokens))
            ids[row, place], attention[row, place] = one.tokens, 1
            trained[row, place], logprobs[row, place] = one.mask, one.logprobs
        yield Padded(
            ids=torch.from_numpy(ids),
            attention=torch.from_numpy(attention),
            prompt=before,
            trained=torch.from_numpy(trained[:, before:]),
            logprobs=torch.from_numpy(logprobs[:, before:]),
            advantages=torch.tensor([one.advantage for one in part]),
        )


def load(model: Path) -> Any:
    """The model without dropout."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    causal: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return causal.eval()


class Anchor(ABC):
    """What all of the anchors do alike."""

    def __init__(self, model: Path) -> None:
        self.model = load(model)

    @abstractmethod
    def run(self, sequences: Sequence[Sample]) -> Pass:
        """Forward and backward; leaves the gradients."""

    def gradient_norm(self) -> float:
        """Of all weights."""
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def clear(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad(set_to_none=True)


class _Plain(Anchor):
    """The logits of a batch, and their log-softmax."""

    @abstractmethod
    def _answer_logits(self, batch: Padded) -> torch.Tensor:
        """(B, A, V) of the tokens after the prompts."""

    def run(self, sequences: Sequence[Sample]) -> Pass:
        """Forward and backward; leaves the gradients."""
        total, entropy, kept = 0.0, 0.0, []
        for batch in padded(sequences):
            everything = torch.log_softmax(self._answer_logits(batch).float(), dim=-1)
            logprobs = everything.gather(-1, batch.answers[..., None]).squeeze(-1)
            with torch.no_grad():
                entropy -= float(((everything.exp() * everything).sum(-1) * batch.trained).sum())
            ratio = (logprobs - batch.logprobs).detach().exp().clamp(max=CAP)
            loss = -(ratio * batch.advantages[:, None] * logprobs * batch.trained).sum()
            loss.backward()
            total += float(loss.detach())
            kept += logprobs.detach()[batch.trained.bool()].tolist()
        return Pass(loss=total, logprobs=kept, entropy=entropy)


class Eager(_Plain):
    """The logits of all tokens, prompts and padding too."""

    def _answer_logits(self, batch: Padded) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).logits
        return logits[:, batch.prompt - 1 : -1]


class Keep(_Plain):
    """The logits of what is after the prompts only."""

    def _answer_logits(self, batch: Padded) -> torch.Tensor:
        count = batch.ids.shape[1] - batch.prompt
        logits: torch.Tensor = self.model(
            input_ids=batch.ids, attention_mask=batch.attention, use_cache=False, logits_to_keep=count + 1
        ).logits
        return logits[:, :-1]
