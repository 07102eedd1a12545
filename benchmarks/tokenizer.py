"""A tokenizer for models of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["write_tokenizer"]


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """One word for each id, because servers and trainers want a tokenizer in a model's folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=backend, pad_token="w0", eos_token="w1").save_pretrained(directory)
