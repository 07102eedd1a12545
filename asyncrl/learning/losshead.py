"""What a causal model has for an output layer, and the log-probabilities that it gives, without whole logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.errors import ConfigError
from asyncrl.learning.losstiles import LogitRule, Pairs, Tile, tiled_logprobs

__all__ = ["OutputHead", "head_logprobs"]


def head_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) float32 log-probabilities of ``targets`` (N,) after ``hidden`` (N, D), and (N,) entropies, no gradient.

    ``weight`` (V, D) and ``bias`` (V,) are the output layer's; its values are scaled, capped and then divided by
    ``temperature`` (N,). ``tile``: see ``losstiles``.
    """
    rule = LogitRule(scale=scale, softcap=softcap)
    return tiled_logprobs([(hidden, weight)], targets, temperature=temperature, bias=bias, rule=rule, tile=tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """The output layer of a transformers model, plain or adapted by PEFT, and what the model does to its values.

    The layer's tensors are read at each call: an adapter may be switched off, and ranks gather weights for a pass.
    """

    layer: Any
    rule: LogitRule

    @classmethod
    def of(cls, causal: Any) -> OutputHead:
        """The head of a causal model of transformers, also inside PEFT; not yet compared with it, see ``check``."""
        causal = _inside_peft(causal)
        layer = causal.get_output_embeddings()
        if layer is None:
            raise ConfigError(f"{type(causal).__name__} has no output layer that gives a token's logits")
        return cls(layer=layer, rule=_rule(causal.config.get_text_config()))

    def logprobs(
        self, hidden: torch.Tensor, targets: torch.Tensor, *, temperature: torch.Tensor, tile: Tile | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) float32 log-probabilities of ``targets`` (N,) after ``hidden`` (N, D), and (N,) entropies, no gradient.

        ``hidden`` is what the model's last norm gives; ``temperature`` (N,).
        """
        pairs, bias = self._tensors(hidden)
        return tiled_logprobs(pairs, targets, temperature=temperature, bias=bias, rule=self.rule, tile=tile)

    @torch.no_grad()
    def check(self, causal: Any) -> None:
        """Compare with the model's own logits; ``ConfigError`` names the class of a model that computes otherwise."""
        causal = _inside_peft(causal)
        tokens = min(8, causal.config.get_text_config().vocab_size)
        ids = torch.arange(tokens, device=self.layer.weight.device)[None]
        hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        logits = causal(input_ids=ids, use_cache=False).logits[0].float()  # (tokens, V)
        exact = logits.log_softmax(-1).gather(-1, ids.T)[:, 0]
        near, _ = self.logprobs(hidden, ids[0], temperature=torch.ones(tokens, device=ids.device))
        # The model rounds its logits to its own precision, several times where it scales and caps them.
        tolerance = 1e-4 + 4 * torch.finfo(hidden.dtype).eps * float(logits.abs().max())
        if not torch.allclose(near, exact, rtol=0, atol=tolerance):
            raise ConfigError(
                f"{type(causal).__name__} computes its logits in a way that the learner cannot reproduce: "
                f"log-probabilities are {float((near - exact).abs().max()):.2g} off"
            )

    def _tensors(self, hidden: torch.Tensor) -> tuple[Pairs, torch.Tensor | None]:
        """Inputs and weights whose products the logits are the sum of, and the bias."""
        layer = _chosen(self.layer)
        base = getattr(layer, "base_layer", layer)
        pairs = [(hidden, base.weight)]
        if base is not layer and not layer.disable_adapters and not layer.merged:
            for name in layer.active_adapters:
                if name in layer.lora_A:
                    down, up = layer.lora_A[name], layer.lora_B[name]
                    # hidden (W + s B A)^T = hidden W^T + (s hidden A^T) B^T, arXiv 2106.09685
                    pairs.append((down(hidden.to(down.weight.dtype)) * layer.scaling[name], up.weight))
        return pairs, getattr(base, "bias", None)


def _inside_peft(causal: Any) -> Any:
    return causal.get_base_model() if hasattr(causal, "get_base_model") else causal


def _chosen(layer: Any) -> Any:
    """The copy of a layer that PEFT trains as a whole (``modules_to_save``), or the layer itself."""
    if not hasattr(layer, "modules_to_save"):
        return layer
    active = [name for name in layer.active_adapters if name in layer.modules_to_save]
    return layer.modules_to_save[active[0]] if active and not layer.disable_adapters else layer.original_module


def _rule(config: Any) -> LogitRule:
    """Of the text model's config. Families have their own names for the same, and ``check`` finds what is missing."""
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere; Falcon-H1; Muse
        scale *= _number(config, name, 1.0)
    divisor = _number(config, "logits_scaling", 1.0)  # Granite, MiniCPM3; HyperCLOVA X multiplies
    scale = scale * divisor if config.model_type.startswith("hyperclovax") else scale / divisor
    cap = _number(config, "final_logit_softcapping", 0.0) or _number(config, "logits_soft_cap", 0.0)  # Gemma
    return LogitRule(scale=scale, softcap=cap or None)


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return default if value is None else float(value)
