"""Small tokenizers in memory: one token for each character, with the chat templates of three families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from asyncrl.types import Trajectory

SPECIALS = [
    "<pad>",
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Drops the reasoning of turns before the last question, opens the last one with an empty thought, and puts
# neighbouring tool results into one user message.
QWEN = (
    "{% set state = namespace(question=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set state.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set text = m.content.split('</think>')[-1] %}"
    "<|im_start|>assistant\n{% if loop.index0 > state.question %}<think>\n\n</think>\n\n{% endif %}"
    "{{ text }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN}


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str | None], Any]:
    """Make a tokenizer with that chat template: the name of a family, the text itself, or None.

    The model may sample the token "ab", which encoding never gives: there, encode(decode(ids)) is not ids.
    """
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *characters, "ab"])}

    def make(template: str | None) -> Any:
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        tokenizer = wrap(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[3:]})
        tokenizer.chat_template = TEMPLATES.get(template or "", template)
        return tokenizer

    return make


@pytest.fixture
def traj() -> Trajectory:
    """A trajectory that has not begun."""
    return Trajectory(id="0", group=0, member=0, row={}, seed=0)
