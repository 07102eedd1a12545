"""Tiny random models of each family, their adapters, and what transformers and peft say about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

__all__ = ["CLOSE", "reference", "tiny_adapter", "tiny_model"]

CLOSE = 1e-3
"""How far two right computations in float32 may be apart in the log-probability of a token of these models.

Against float64 each is off by up to 8e-5 (qwen2 with an adapter, at temperature 0.6; the logits reach 7), and how much
changes with the processor, its instructions, the threads and the shape of the batch. What is wrong, such as another
adapter, temperature or position, shows at 0.1 and more.
"""
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV .\n"
SPECIALS = ("<pad>", "<eos>", "!")
EOS = 1
# SGLang on a CPU does not take adapters of models whose intermediate size is no multiple of 32.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _config(family: str, **sizes: int) -> Any:
    import transformers

    if family == "llama":
        return transformers.LlamaConfig(**SIZES | sizes, rope_parameters=LLAMA3_ROPE)
    if family == "qwen2":
        return transformers.Qwen2Config(**SIZES | {"tie_word_embeddings": True} | sizes)
    return transformers.Qwen3Config(**SIZES | sizes, head_dim=16)


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a random model: ``tiny_model("qwen3", seed=1)``. Its logits differ by several units.

    Further options replace sizes of its configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    @cache
    def make(family: str = "qwen3", seed: int = 0, **sizes: int) -> Path:
        path = tmp_path_factory.mktemp(f"{family}-{seed}")
        model: Any = AutoModelForCausalLM.from_config(_config(family, **sizes))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.25
            parameter.data.copy_(1 + noise if "norm" in name else noise)
        model.save_pretrained(path)
        _write_tokenizer(path)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_adapter(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A PEFT folder with a random adapter of every linear module: ``tiny_adapter("qwen3", seed=1)``."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    @cache
    def make(family: str = "qwen3", seed: int = 0, **options: Any) -> Path:
        path = tmp_path_factory.mktemp(f"{family}-adapter-{seed}")
        base: Any = AutoModelForCausalLM.from_pretrained(tiny_model(family))
        config = LoraConfig(r=4, lora_alpha=6, target_modules=options.pop("target_modules", "all-linear"), **options)
        model = get_peft_model(base, config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        model.save_pretrained(str(path), save_embedding_layers=False)
        return path

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., torch.Tensor]:
    """(T, V) logits by transformers, and peft with an adapter: ``reference(model, tokens, adapter)``."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    @cache
    def load(path: Path, adapter: Path | None) -> Any:
        base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return base if adapter is None else PeftModel.from_pretrained(base, str(adapter)).eval()

    def logits(path: Path, tokens: Sequence[int], adapter: Path | None = None) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = load(path, adapter)(input_ids=torch.tensor([list(tokens)])).logits[0]
        return found

    return logits
