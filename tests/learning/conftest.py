"""What the tests of learning share: a random model of a few thousand parameters."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: two layers, 32 tokens, weights large enough that its predictions differ."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    # A tokenizer's files, of which no test reads more than the bytes.
    for name in ("tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"):
        (path / name).write_text(f'{{"file": "{name}"}}', encoding="utf-8")
    return path
