"""The forward pass of dense Llama-family models, with a KV pool and several LoRA adapters in one batch.

It exists beside transformers because a sampler needs what a plain forward does not give: rows of different lengths
whose keys and values lie in one pool, and adapters chosen by row. Left out: quantised weights, mixture of experts,
sliding windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncrl.errors import ConfigError

__all__ = ["Adapter", "DecoderModel", "ForwardBatch", "load_adapter"]

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_PREFIX = "base_model.model.model.layers."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter: module path ("3.self_attn.q_proj") -> (A, B), with the scale in B."""

    name: str
    modules: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """B rows with up to Q new tokens each, right-padded, and up to L tokens of context, the new ones included."""

    input_ids: torch.Tensor
    """(B, Q)"""
    positions: torch.Tensor
    """(B, Q) position of each new token in its sequence."""
    valid: torch.Tensor
    """(B, Q) False for padding."""
    context_slots: torch.Tensor
    """(B, L) pool slot of each context token; anything where there is none."""
    new_slots: torch.Tensor
    """(N,) pool slots of the valid new tokens, row after row."""
    adapters: Sequence[tuple[Adapter, torch.Tensor | None]]
    """Adapters and the rows that use them; None for all rows."""


class DecoderModel:
    """Weights of the model in ``path``, and a KV pool of ``slots`` tokens."""

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device, slots: int | None) -> None:
        self.config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
        architecture = (self.config.architectures or ["?"])[0]
        if architecture not in _ARCHITECTURES:
            raise ConfigError(
                f"the embedded server has no forward pass for {architecture}; it knows {', '.join(_ARCHITECTURES)}: "
                "serve this model with SGLang"
            )
        self._dtype = dtype
        self.device = device
        config = self.config
        self._layers: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotary = LlamaRotaryEmbedding(config)
        self._inverse_frequencies = rotary.inv_freq.float().to(device)
        self._rotary_scale: float = rotary.attention_scaling
        self.load_weights(path)
        self.slots = slots or self._default_slots()
        shape = (self.slots, self._kv_heads, self._head_dim)
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self._layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self._layers)]

    def load_weights(self, path: Path) -> None:
        """Read every weight from the model folder ``path``; nothing changes if one is missing or has another shape."""
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError.for_value("model", str(path), "a folder with safetensors weights")
        read: dict[str, torch.Tensor] = {}
        for file in files:
            read.update(load_file(file))
        weights = {name: tensor.to(self.device, self._dtype) for name, tensor in read.items()}
        if self.config.tie_word_embeddings or "lm_head.weight" not in weights:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        before = getattr(self, "_weights", None)
        if before is not None and {name: tensor.shape for name, tensor in before.items()} != {
            name: tensor.shape for name, tensor in weights.items()
        }:
            raise ValueError(f"the weights in {path} are not those of the model that is served")
        self._weights = weights

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """(B, Q, D) final hidden states; the new tokens' keys and values are in the pool afterwards."""
        x = F.embedding(batch.input_ids, self._weights["model.embed_tokens.weight"])
        cos, sin = self._rotation(batch.positions)
        context = torch.arange(batch.context_slots.shape[1], device=self.device)
        visible = context[None, None, None, :] <= batch.positions[:, None, :, None]  # (B, 1, Q, L)
        for layer in range(self._layers):
            normed = self._norm(x, f"{layer}.input_layernorm")
            x = x + self._attention(layer, normed, batch, cos, sin, visible)
            normed = self._norm(x, f"{layer}.post_attention_layernorm")
            gate = F.silu(self._linear(normed, f"{layer}.mlp.gate_proj", batch))
            up = self._linear(normed, f"{layer}.mlp.up_proj", batch)
            x = x + self._linear(gate * up, f"{layer}.mlp.down_proj", batch)
        return self._rms(x, self._weights["model.norm.weight"])

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
        prefix = f"{layer}.self_attn."
        q = self._linear(x, prefix + "q_proj", batch).view(rows, queries, self._heads, self._head_dim)
        k = self._linear(x, prefix + "k_proj", batch).view(rows, queries, self._kv_heads, self._head_dim)
        v = self._linear(x, prefix + "v_proj", batch).view(rows, queries, self._kv_heads, self._head_dim)
        if f"model.layers.{prefix}q_norm.weight" in self._weights:
            q, k = self._norm(q, prefix + "q_norm"), self._norm(k, prefix + "k_norm")
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        self._keys[layer][batch.new_slots] = k[batch.valid]
        self._values[layer][batch.new_slots] = v[batch.valid]
        keys = self._keys[layer][batch.context_slots].transpose(1, 2)  # (B, H_kv, L, d)
        values = self._values[layer][batch.context_slots].transpose(1, 2)
        # The query heads of one key head go into one longer query, so that keys are not copied for each of them.
        share = self._heads // self._kv_heads
        q = q.view(rows, queries, self._kv_heads, share, self._head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, self._kv_heads, share * queries, self._head_dim)
        mask = visible.repeat(1, 1, share, 1) if queries > 1 else visible
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        out = out.view(rows, self._kv_heads, share, queries, self._head_dim).permute(0, 3, 1, 2, 4)
        return self._linear(out.reshape(rows, queries, self._heads * self._head_dim), prefix + "o_proj", batch)

    def _linear(self, x: torch.Tensor, module: str, batch: ForwardBatch) -> torch.Tensor:
        name = f"model.layers.{module}"
        out = F.linear(x, self._weights[name + ".weight"], self._weights.get(name + ".bias"))
        for adapter, rows in batch.adapters:
            pair = adapter.modules.get(module)
            if pair is None:
                continue
            a, b = pair
            if rows is None:
                out += F.linear(F.linear(x, a), b)
            else:
                out[rows] += F.linear(F.linear(x[rows], a), b)
        return out

    def _norm(self, x: torch.Tensor, module: str) -> torch.Tensor:
        return self._rms(x, self._weights[f"model.layers.{module}.weight"])

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].float() * self._inverse_frequencies  # (B, Q, d / 2)
        angles = torch.cat([angles, angles], dim=-1)[:, :, None, :]
        scale = self._rotary_scale
        return (angles.cos() * scale).to(self._dtype), (angles.sin() * scale).to(self._dtype)

    def _default_slots(self) -> int:
        """A gigabyte of keys and values, but no more than 64k tokens."""
        per_token = 2 * self._layers * self._kv_heads * self._head_dim * self._dtype.itemsize
        return min(65_536, 2**30 // per_token)


def load_adapter(name: str, path: Path, *, dtype: torch.dtype, device: torch.device) -> Adapter:
    """Read a PEFT folder. Raises ``ValueError`` for what a server of SGLang's kind cannot apply."""
    config = orjson.loads((path / "adapter_config.json").read_bytes())
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("use_rslora"):
        raise ValueError(f"{path} is not a plain LoRA adapter")
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(path / "adapter_model.safetensors")
    modules: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, a in tensors.items():
        if ".lora_B" in key:
            continue
        if not key.startswith(_PREFIX):
            raise ValueError(f"{path} adapts {key}, which is outside of the layers' linear modules")
        module = key.removeprefix(_PREFIX).partition(".lora_A")[0]
        b = tensors[key.replace(".lora_A", ".lora_B")] * scale
        modules[module] = (a.to(device, dtype), b.to(device, dtype))
    return Adapter(name=name, modules=modules)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
