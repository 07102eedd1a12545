"""Other people's learners on a CPU: TRL's GRPO step, the tree rows of TRL's AsyncGRPO, and Liger's chunked loss.

They are those of the dependency group ``anchors``. TRL's tree rows are made for a kernel that a CPU has not; here they
have torch's attention, segment by segment, in its place. On a CPU both heads of TRL compute log-probabilities of all
tokens, of prompts and padding too; so they do in TRL. Liger computes no entropies.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.learners.contestant import Pass
from benchmarks.learners.plain import CAP, Anchor, padded
from benchmarks.learners.workloads import Sample

__all__ = ["Liger", "TRLStep", "TRLTree"]

_GROUP = 8


class Liger(Anchor):
    """``LigerFusedLinearGRPOLoss`` on the hidden states of plain transformers."""

    def __init__(self, model: Path) -> None:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        super().__init__(model)
        self._loss = LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, compiled=False, loss_type="cispo", epsilon_high=CAP
        )

    def run(self, sequences: Sequence[Sample]) -> Pass:
        """Forward and backward; leaves the gradients."""
        total = 0.0
        for batch in padded(sequences):
            states = self.model.model(
                input_ids=batch.ids, attention_mask=batch.attention, use_cache=False
            ).last_hidden_state
            loss, _ = self._loss(
                states[:, batch.prompt - 1 : -1],
                self.model.lm_head.weight,
                batch.answers,
                batch.trained,
                batch.advantages,
                old_per_token_logps=batch.logprobs,
                num_items_in_batch=1.0,
            )
            loss.backward()
            total += float(loss.detach())
        return Pass(loss=total, logprobs=None, entropy=None)


class TRLStep(Anchor):
    """``GRPOTrainer.compute_loss`` and its backward pass, with the trainer's defaults besides precision and loss."""

    def __init__(self, model: Path) -> None:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        threads = torch.get_num_threads()
        super().__init__(model)
        self._trainer = _grpo_trainer(self.model)
        torch.set_num_threads(threads)
        self._said: list[tuple[torch.Tensor, torch.Tensor]] = []
        compute: Callable[..., Any] = self._trainer._get_per_token_logps_and_entropies

        def listened(*arguments: Any, **options: Any) -> Any:
            said = compute(*arguments, **options)
            self._said.append((said[0].detach(), said[1].detach()))
            return said

        self._trainer._get_per_token_logps_and_entropies = listened

    def run(self, sequences: Sequence[Sample]) -> Pass:
        """Forward and backward; leaves the gradients."""
        total, entropy, kept = 0.0, 0.0, []
        for batch in padded(sequences):
            inputs = {
                "prompt_ids": batch.ids[:, : batch.prompt],
                "prompt_mask": batch.attention[:, : batch.prompt],
                "completion_ids": batch.answers,
                "completion_mask": batch.attention[:, batch.prompt :],
                "tool_mask": batch.trained,
                "advantages": batch.advantages,
                "old_per_token_logps": batch.logprobs,
                "num_items_in_batch": torch.tensor(1.0),
            }
            loss = self._trainer.compute_loss(self._trainer.model, inputs)
            self._trainer.accelerator.backward(loss)
            total += float(loss.detach())
            logprobs, entropies = self._said.pop()
            kept += logprobs[batch.trained.bool()].tolist()
            entropy += float((entropies * batch.trained).sum())
        return Pass(loss=total, logprobs=kept, entropy=entropy)


def _grpo_trainer(model: Any) -> Any:
    """For a model; it never trains on its own data, but wants some and a tokenizer."""
    from datasets import IterableDataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def rows() -> Iterator[dict[str, str]]:
        yield from ({"prompt": "w5 w6"} for _ in range(64))

    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="asyncrl-"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=_GROUP,
        num_generations=_GROUP,
        gradient_accumulation_steps=1,
        beta=0.0,
        loss_type="cispo",
        epsilon_high=CAP,
        scale_rewards="none",
        save_strategy="no",
        max_steps=1,
        disable_dropout=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=options,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=IterableDataset.from_generator(rows),
        processing_class=AutoTokenizer.from_pretrained(model.name_or_path, padding_side="left"),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.create_optimizer()
    return trainer


class TRLTree(Anchor):
    """AsyncGRPO's rows: the sequences of a group as a prefix trie, one row a pass."""

    def __init__(self, model: Path) -> None:
        from trl.experimental.async_grpo import packing
        from trl.trainer.utils import add_fused_lm_head

        super().__init__(model)
        self._row = packing.TreeRow
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_by_segment)
        packing.register_tree_attention()
        self.model.set_attn_implementation(packing.TREE_ATTENTION)
        add_fused_lm_head(self.model, temperature=1.0, outputs=("log_probs", "entropy"))

    def run(self, sequences: Sequence[Sample]) -> Pass:
        """Forward and backward; leaves the gradients."""
        total, entropy, kept = 0.0, 0.0, []
        for first in range(0, len(sequences), _GROUP):
            row = self._row()
            for one in sequences[first : first + _GROUP]:
                row.add(_tree_item(one))
            packed = row.pack()
            places = packed["token_index"]
            said = self._forward(packed)
            logprobs = said.log_probs.flatten()[places]
            ratio = (logprobs - packed["old_log_probs"]).detach().exp().clamp(max=CAP)
            loss = -(ratio * packed["advantages"] * logprobs).sum()
            loss.backward()
            total += float(loss.detach())
            kept += logprobs.detach().tolist()
            entropy += float(said.entropy.detach().flatten()[places].sum())
        return Pass(loss=total, logprobs=kept, entropy=entropy)

    def _forward(self, packed: dict[str, torch.Tensor]) -> Any:
        longest_segment, longest_path = packed["tree_max_seqlens"].tolist()
        return self.model(
            input_ids=packed["input_ids"][None],
            position_ids=packed["position_ids"][None],
            shift_labels=packed["shift_labels"][None],
            fused_lm_head=True,
            tree_kv_index=packed["tree_kv_index"],
            tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
            tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
            tree_max_seqlen_q=longest_segment,
            tree_max_seqlen_k=longest_path,
        )


def _tree_item(one: Sample) -> dict[str, Any]:
    return {
        "input_ids": torch.from_numpy(one.tokens),
        "completion_mask": torch.from_numpy(one.mask.astype(np.int64)),
        "old_log_probs": torch.from_numpy(one.logprobs),
        "advantage": one.advantage,
        "group_id": 0,
    }


def _by_segment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    *_: int,
    softmax_scale: float | None = None,
    **__: object,
) -> torch.Tensor:
    """What flash attention does with segments of queries, each at the end of its path of keys; (tokens, heads, D)."""
    parts = []
    for a, b, c, d in zip(ends_q.tolist(), ends_q[1:].tolist(), ends_k.tolist(), ends_k[1:].tolist(), strict=False):
        causal = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[a:b].transpose(0, 1)[None],
                k[c:d].transpose(0, 1)[None],
                v[c:d].transpose(0, 1)[None],
                attn_mask=causal,
                scale=softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )[0].transpose(0, 1)
        )
    return torch.cat(parts)
