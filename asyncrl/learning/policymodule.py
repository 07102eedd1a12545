"""The model as a torch module: from a pass to the log-probabilities of its trained tokens, the output layer included.

Logits exist only for trained tokens: hidden states are gathered first, and only those rows meet the output layer. A
pass is deterministic on a CPU: the same sequences give the same sums to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.losshead import OutputHead
from asyncrl.learning.prefixtrees import Pass, passes, row_passes
from asyncrl.learning.treeattention import TREE_ATTENTION, TreePlan

__all__ = ["PolicyModule"]


class PolicyModule(torch.nn.Module):
    """Holds the causal model of transformers as ``causal``; everything that is trained goes through ``forward``."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.causal = causal
        self._head = OutputHead.of(causal)
        self._head.check(causal)
        self.unshared: str | None = None
        """Why sequences do not share what they begin with, None if they do; see ``reason_not_to_share``."""
        self.window: int | None = _shortest_window(causal)
        """Longest sequence that can share, where attention does not look further back; None without a limit."""
        self._own_attention: str = causal.config._attn_implementation

    def passes(self, sequences: Sequence[TrainingSequence], max_tokens: int) -> list[Pass]:
        """All trained tokens of ``sequences``, in passes of at most ``max_tokens`` tokens."""
        if self.unshared is not None:
            return row_passes(sequences, max_tokens)
        return passes(sequences, max_tokens, longest=self.window)

    def forward(self, one: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) float32 log-probabilities of the trained tokens, sequence after sequence, and (N,) entropies."""
        states = self.states(one)
        device = states.device
        hidden = states.flatten(0, 1).index_select(0, _tensor(one.places, device))  # (U, D)
        temperatures = _tensor(one.temperatures, device)
        logprobs, entropy = self._head.logprobs(hidden, _tensor(one.targets, device), temperature=temperatures)
        rows = _tensor(one.rows, device)
        return logprobs.index_select(0, rows), entropy.index_select(0, rows)

    def states(self, one: Pass) -> torch.Tensor:
        """(R, T, D) hidden states before the output layer."""
        device = self.causal.device
        ids = _tensor(one.ids, device)
        if one.nodes is None or one.positions is None:
            # The padding is on the right, where causal attention never looks from a token: it needs no attention mask.
            self._attend_by(self._own_attention)
            return self._base(input_ids=ids)
        self._attend_by(TREE_ATTENTION)
        plan = TreePlan(one.nodes, longest=int(one.positions.max()) + 1, dtype=self.causal.dtype, device=device)
        return self._base(input_ids=ids, position_ids=_tensor(one.positions, device)[None], tree_plan=plan)

    def _base(self, **inputs: Any) -> torch.Tensor:
        states: torch.Tensor = self.causal.base_model(use_cache=False, **inputs).last_hidden_state
        return states

    def _attend_by(self, implementation: str) -> None:
        if self.causal.config._attn_implementation != implementation:
            self.causal.set_attn_implementation(implementation)


def _shortest_window(causal: Any) -> int | None:
    config = causal.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _tensor(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
