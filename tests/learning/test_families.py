"""The families that people train, each as a random model of two small layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from asyncrl.learning.losses import PolicyGradient
from asyncrl.learning.options import LoraConfig
from tests.learning.tiny import (
    LORA,
    full_logprobs,
    gradients_of,
    largest_difference,
    load,
    random_sequences,
    train_step,
)

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = ["sliding_attention", "full_attention"]
# Caps and scales that change the logits of so small a model.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "SmolLM3": {},
    "Gemma": {},
    "Gemma2": {"final_logit_softcapping": 2.0, "sliding_window": 4, "layer_types": WINDOW, "query_pre_attn_scalar": 16},
    "Gemma3": {"final_logit_softcapping": 2.0, "sliding_window": 4, "layer_types": WINDOW, "query_pre_attn_scalar": 16},
    "Granite": {"logits_scaling": 4.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5},
    "Cohere2": {"logit_scale": 0.25, "sliding_window": 4, "layer_types": WINDOW},
    "Qwen3Moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
CLOSE = 3e-5
"""Of log-probabilities and, relative to the largest, of gradients: float32 is off by some 1e-6."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's random model."""

    @cache
    def make(family: str) -> Path:
        transformers.utils.logging.disable_progress_bar()
        name = {"Gemma3": "Gemma3Text"}.get(family, family)
        config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES[family])
        torch.manual_seed(0)
        path = tmp_path_factory.mktemp(family)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return path

    return make


def _reference(path: Path, adapter: Path | None = None) -> Any:
    """By transformers alone, with PEFT for an adapter; the plainest attention has all that a family asks for."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return model if adapter is None else peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True).eval()


def _difference(model: Any, reference: Any) -> float:
    """The largest of the log-probabilities of all tokens."""
    differences = []
    for sequence in random_sequences(1, 2):
        with torch.no_grad():
            expected = full_logprobs(reference, sequence)
        found = model.logprobs(sequence.tokens, 1, sequence.temperature)
        differences.append((torch.from_numpy(found) - expected).abs().max())
    return float(torch.stack(differences).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, None) for family in FAMILIES),
        *((family, LORA) for family in ("Qwen3", "Gemma2", "Granite", "Qwen3Moe")),
    ],
    ids=lambda value: value if isinstance(value, str) else "full" if value is None else "lora",
)
def test_a_family_is_trained_and_exported(
    folder: Callable[[str], Path], family: str, lora: LoraConfig | None, tmp_path: Path
) -> None:
    """Log-probabilities and gradients are those of the model's own logits; what is exported is what was trained."""
    path = folder(family)
    model = load(path, lora=lora)
    assert _difference(model, _reference(path)) < CLOSE

    train_step(model, random_sequences(2))
    model.export(tmp_path)
    reference = _reference(tmp_path) if lora is None else _reference(path, tmp_path)
    assert _difference(model, reference) < CLOSE
    again = load(path, lora=lora, gradient_checkpointing=True)
    again.load_exported(tmp_path)
    assert _difference(again, reference) < CLOSE

    sequences = random_sequences(3)
    for sequence in sequences:
        logprobs = full_logprobs(reference, sequence)[torch.from_numpy(sequence.mask[1:])]
        (-sequence.advantage * logprobs.sum()).backward()
    inner = reference if lora is None else reference.get_base_model()
    expected = gradients_of(inner)
    largest = max(float(one.abs().max()) for one in expected.values())
    for one in (model, again):
        one.forward_backward(sequences, PolicyGradient())
        assert largest_difference(gradients_of(one._causal), expected) < CLOSE * max(1.0, largest)
