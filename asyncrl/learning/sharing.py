"""Whether a model's sequences may share what they begin with, found out before it is trained.

Sharing is exact for attention that looks at all tokens before a token. What the model's configuration or its calls to
attention say otherwise is a reason against it; and so is a difference of a small tree to its sequences one by one.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.policymodule import PolicyModule
from asyncrl.learning.prefixtrees import passes, row_passes
from asyncrl.learning.treeattention import SharingError
from asyncrl.types import IntArray

__all__ = ["reason_not_to_share"]

_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_CLOSE = 1e-3
"""How far apart hidden states may be, as a part of their norm: rounding gives 1e-5, a wrong neighbour 1e-2 and more."""
_CLOSE_IN_16_BITS = 0.1
"""The same on average, because a token may be sent to another expert: rounding gives a few hundredths."""


def reason_not_to_share(module: PolicyModule) -> str | None:
    """None if its sequences may share; the reason completes the sentence "this model .."."""
    causal = module.causal
    config = causal.config.get_text_config()
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - _KNOWN_LAYERS)
    if kinds:
        return f"has layers of {', '.join(kinds)}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "has a soft cap on its attention"
    if not getattr(causal, "_supports_attention_backend", False):
        return "has an attention of its own"
    try:
        differences = _differences(module)
    except SharingError as error:
        return str(error)
    exact = causal.dtype in (torch.float32, torch.float64)
    difference, close = (differences.max(), _CLOSE) if exact else (differences.mean(), _CLOSE_IN_16_BITS)
    # Not a number is not close.
    if not float(difference) < close:
        return f"gives hidden states that differ by {float(difference):.2g} of their norm"
    return None


@torch.no_grad()
def _differences(module: PolicyModule) -> torch.Tensor:
    """(tokens,) of the hidden states of a nested tree to those of its sequences alone, as a part of their norm."""
    chance = np.random.default_rng(0)
    root, left, right, first, second = (
        chance.integers(module.causal.config.get_text_config().vocab_size, size=size) for size in (6, 5, 4, 3, 7)
    )
    sequences = [_sequence(*parts) for parts in ((root, left, first), (root, left, second), (root, right))]
    (tree,) = passes(sequences, sum(len(sequence.tokens) for sequence in sequences))
    shared = module.states(tree)[0].float()
    differences = []
    for sequence, rows in zip(sequences, np.split(tree.rows, np.cumsum(tree.tokens_B)[:-1]), strict=True):
        (alone,) = row_passes([sequence], 1)
        expected = module.states(alone)[0].float()
        found = shared[torch.from_numpy(tree.places[rows])]
        differences.append((found - expected).norm(dim=-1) / expected.norm(dim=-1))
    return torch.cat(differences)


def _sequence(*parts: IntArray) -> TrainingSequence:
    tokens = np.concatenate(parts).astype(np.int32)
    return TrainingSequence(
        tokens=tokens,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        mask=np.arange(len(tokens)) > 0,
        ages=np.zeros(len(tokens), dtype=np.int32),
        advantage=0.0,
        weight=0.0,
    )
