"""A model to begin with: random weights, a tenth of a million of them, and no words but those of the task.

It learns this task in a minute on any machine, and nothing else. For a real model name one in the place of this file:
``[model] path = "Qwen/Qwen3-0.6B"``, a folder or a name of the Hugging Face hub.
"""

from __future__ import annotations

import re
from pathlib import Path


def build_model(directory: Path, words: list[str]) -> None:
    """Write the model and its tokenizer into ``directory``; each of ``words`` is one token."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = ["<pad>", "<end>", "<unknown>", *words]
    backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(vocabulary)}, unk_token="<unknown>"))
    longest_first = sorted(vocabulary, key=len, reverse=True)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>"
        "{% endfor %}{% if message['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(directory)

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.15,  # larger than usual: a LoRA adapter leaves the embeddings as they are
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
