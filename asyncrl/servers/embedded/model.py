"""The forward pass of dense Llama-family models, with a KV pool and several LoRA adapters in one batch.

It exists beside transformers because a sampler needs what a plain forward does not give: rows of different lengths
whose keys and values lie in one pool, and adapters chosen by row. Left out: quantised weights, mixture of experts,
sliding windows, adapters of the embedding or the head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncrl.errors import ConfigError
from asyncrl.sampling.replies import shown
from asyncrl.servers.embedded.adapterfolder import Adapter, read_adapter, read_tensors

__all__ = ["Adapter", "DecoderModel", "ForwardBatch"]

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_TYPES = ("default", "linear", "llama3")
# Those whose frequencies do not depend on the length of the sequence.
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_LINEAR = (*_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_OPTIONAL = (*(f"{module}.bias" for module in _LINEAR), "self_attn.q_norm.weight", "self_attn.k_norm.weight")
_DERIVED = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """B rows with up to Q new tokens each, right-padded, and up to L tokens of context, the new ones included."""

    input_ids: torch.Tensor
    """(B, Q)"""
    positions: torch.Tensor
    """(B, Q) position of each new token in its sequence."""
    new_tokens: torch.Tensor | None
    """(N,) where the new tokens are among the B * Q entries, row after row; None if there is no padding."""
    context_slots: torch.Tensor
    """(B, L) pool slot of each context token; anything where there is none."""
    new_slots: torch.Tensor
    """(N,) pool slots of the new tokens, row after row."""
    adapters: Sequence[tuple[Adapter, torch.Tensor | None]]
    """Adapters and the rows that use them; None for all rows."""


class DecoderModel:
    """Weights of the model in ``path``, and a KV pool of ``slots`` tokens."""

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device, slots: int | None) -> None:
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
        _check_supported(config)
        self.config = config
        self.device = device
        self._dtype = dtype
        self._layers: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._epsilon: float = config.rms_norm_eps
        self._inverse_frequencies = LlamaRotaryEmbedding(config).inv_freq.float().to(device)
        self._weights: dict[str, torch.Tensor] = {}
        self.load_weights(path)
        self.slots = slots or self._default_slots()
        # Keys and values of a token lie side by side, so that a context is gathered at once.
        shape = (self.slots, 2 * self._kv_heads, self._head_dim)
        self._pool = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self._layers)]

    def load_weights(self, path: Path) -> None:
        """Read every weight from the model folder ``path``; nothing changes unless it has just those of the model."""
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError.for_value("model", str(path), "a folder with safetensors weights")
        read: dict[str, torch.Tensor] = {}
        for file in files:
            read.update(read_tensors(file))
        missing = [name for name in self._needed() if name not in read]
        if missing:
            raise ConfigError.for_value("model", str(path), f"a folder with all weights; {missing[0]} is missing")
        if self.config.tie_word_embeddings:
            read["lm_head.weight"] = read["model.embed_tokens.weight"]
        # What is not used is no part of the model: some write down numbers that follow from the configuration.
        used = {name: tensor for name, tensor in read.items() if not name.endswith(_DERIVED)}
        before = self._weights or used
        unknown = sorted(used.keys() - self._known)
        if unknown:
            raise ConfigError(f"{path} has weights that this server has no use for, such as {shown(unknown[0])}")
        for name in {**before, **used}:
            if name not in before or name not in used or used[name].shape != before[name].shape:
                raise ValueError(f"{path} is another model than the one that is served: its {shown(name)} differs")
        weights = {name: tensor.to(self.device, self._dtype) for name, tensor in used.items()}
        if self.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self._weights = weights

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace some weights; nothing changes if one of them is not ours or has another shape."""
        for name, tensor in tensors.items():
            if name not in self._weights or self._weights[name].shape != tensor.shape:
                raise ValueError(
                    f"{shown(name)} of shape {list(tensor.shape)} is no weight of the model that is served"
                )
        weights = {name: tensor.to(self.device, self._dtype) for name, tensor in tensors.items()}
        if self.config.tie_word_embeddings and "model.embed_tokens.weight" in weights:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self._weights = self._weights | weights

    def shapes(self) -> dict[str, list[int]]:
        """Of each weight."""
        return {name: list(tensor.shape) for name, tensor in self._weights.items()}

    def checksums(self) -> dict[str, str]:
        """A digest of the bytes of each weight."""
        digests = {}
        for name, tensor in sorted(self._weights.items()):
            content = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
            digests[name] = hashlib.sha256(content.tobytes()).hexdigest()[:16]
        return digests

    def load_adapter(self, path: Path) -> Adapter:
        """Read a PEFT folder. Raises ``ValueError`` for what is not a plain LoRA adapter of this model."""
        modules = [f"model.layers.{i}.{module}" for i in range(self._layers) for module in _LINEAR]
        shapes = {module: (w.shape[0], w.shape[1]) for module in modules for w in (self._weights[module + ".weight"],)}
        return read_adapter(path, shapes=shapes, device=self.device, dtype=self._dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """(B, Q, D) final hidden states; the new tokens' keys and values are in the pool afterwards."""
        x = F.embedding(batch.input_ids, self._weights["model.embed_tokens.weight"])
        cos, sin = self._rotation(batch.positions)
        context = torch.arange(batch.context_slots.shape[1], device=self.device)
        visible = context[None, None, None, :] <= batch.positions[:, None, :, None]  # (B, 1, Q, L)
        for layer in range(self._layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            x = x + self._attention(layer, normed, batch, cos, sin, visible)
            normed = self._norm(x, prefix + "post_attention_layernorm")
            gate = F.silu(self._linear(normed, prefix + "mlp.gate_proj", batch))
            up = self._linear(normed, prefix + "mlp.up_proj", batch)
            x = x + self._linear(gate * up, prefix + "mlp.down_proj", batch)
        return self._norm(x, "model.norm")

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, V) float32 logits of (N, D) hidden states."""
        return F.linear(hidden, self._weights["lm_head.weight"]).float()

    def _attention(
        self,
        layer: int,
        x: torch.Tensor,
        batch: ForwardBatch,
        cos: torch.Tensor,
        sin: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        rows, queries, _ = x.shape
        prefix = f"model.layers.{layer}.self_attn."
        q = self._linear(x, prefix + "q_proj", batch).view(rows, queries, self._heads, self._head_dim)
        k = self._linear(x, prefix + "k_proj", batch).view(rows, queries, self._kv_heads, self._head_dim)
        v = self._linear(x, prefix + "v_proj", batch).view(rows, queries, self._kv_heads, self._head_dim)
        if prefix + "q_norm.weight" in self._weights:
            q, k = self._norm(q, prefix + "q_norm"), self._norm(k, prefix + "k_norm")
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        new = torch.cat([k, v], dim=2).flatten(0, 1)  # (B * Q, 2 H_kv, d)
        pool = self._pool[layer]
        pool[batch.new_slots] = new if batch.new_tokens is None else new[batch.new_tokens]
        context = pool.index_select(0, batch.context_slots.flatten()).view(rows, -1, 2 * self._kv_heads, self._head_dim)
        keys, values = context.transpose(1, 2).split(self._kv_heads, dim=1)  # (B, H_kv, L, d)
        # The query heads of one key head go into one longer query, so that keys are not copied for each of them.
        share = self._heads // self._kv_heads
        q = q.view(rows, queries, self._kv_heads, share, self._head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, self._kv_heads, share * queries, self._head_dim)
        mask = visible.repeat(1, 1, share, 1) if queries > 1 else visible
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        out = out.view(rows, self._kv_heads, share, queries, self._head_dim).permute(0, 3, 1, 2, 4)
        return self._linear(out.reshape(rows, queries, self._heads * self._head_dim), prefix + "o_proj", batch)

    def _linear(self, x: torch.Tensor, module: str, batch: ForwardBatch) -> torch.Tensor:
        out = F.linear(x, self._weights[module + ".weight"], self._weights.get(module + ".bias"))
        for adapter, rows in batch.adapters:
            pair = adapter.get(module)
            if pair is None:
                continue
            a, b = pair
            if rows is None:
                out += F.linear(F.linear(x, a), b)
            else:
                out[rows] += F.linear(F.linear(x[rows], a), b)
        return out

    def _norm(self, x: torch.Tensor, module: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._weights[module + ".weight"], self._epsilon)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].float() * self._inverse_frequencies  # (B, Q, d / 2)
        angles = torch.cat([angles, angles], dim=-1)[:, :, None, :]
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def _needed(self) -> list[str]:
        names = ["model.embed_tokens", "model.norm"]
        names += [f"model.layers.{i}.{module}" for i in range(self._layers) for module in (*_LINEAR, *_NORMS)]
        if not self.config.tie_word_embeddings:
            names.append("lm_head")
        return [name + ".weight" for name in names]

    @cached_property
    def _known(self) -> set[str]:
        """Every weight that a model of this configuration may have."""
        optional = {f"model.layers.{i}.{name}" for i in range(self._layers) for name in _OPTIONAL}
        return {*self._needed(), "lm_head.weight", *optional}

    def _default_slots(self) -> int:
        """A gigabyte of keys and values, but no more than 64k tokens."""
        per_token = 2 * self._layers * self._kv_heads * self._head_dim * self._dtype.itemsize
        return min(65_536, 2**30 // per_token)


def _check_supported(config: Any) -> None:
    architecture = (config.architectures or ["?"])[0]
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    activation = getattr(config, "hidden_act", None)
    checks = {
        f"the architecture {architecture}": architecture in _ARCHITECTURES,
        f"rope of type {rope!r}": rope in _ROPE_TYPES,
        f"the activation {activation!r}": activation == "silu",
        "sliding windows": not getattr(config, "use_sliding_window", False),
    }
    for feature, known in checks.items():
        if not known:
            raise ConfigError(
                f"the embedded server has no forward pass for {feature}; it knows {', '.join(_ARCHITECTURES)} with "
                f"rope of type {', '.join(_ROPE_TYPES)}, silu and full attention: serve this model with SGLang"
            )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
