"""A tokenizer in memory for any text: a token for each byte, and a chat template that knows tools.

It has what renderers ask of a transformers tokenizer, and needs neither transformers nor a file. The template is of the
ChatML kind: it announces tools, writes calls between ``<tool_call>`` tags as JSON, and results as messages of a tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asyncrl.types import Message

__all__ = ["ByteTokenizer"]

_BYTES = 256
_END = "<|im_end|>"
_SPECIALS = ("<|im_start|>", _END)
_MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call tools. A call is JSON between tags: <tool_call>{"name": .., "arguments": {..}}</tool_call>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": {{ call.function.name | tojson }}, \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True, slots=True)
class _Added:
    """A token beside the bytes."""

    text: str
    special: bool

    def __str__(self) -> str:
        return self.text


class ByteTokenizer:
    """One token a byte, and one for each marker of the template."""

    chat_template = _TEMPLATE
    bos_token: str | None = None
    bos_token_id: int | None = None
    eos_token = _END

    def __init__(self) -> None:
        added = [*((text, True) for text in _SPECIALS), *((text, False) for text in _MARKERS)]
        self.added_tokens_decoder = {_BYTES + place: _Added(*token) for place, token in enumerate(added)}
        self._ids = {token.text: id for id, token in self.added_tokens_decoder.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, self._ids)) + ")")
        self.all_special_tokens = list(_SPECIALS)
        self.all_special_ids = [self._ids[text] for text in _SPECIALS]
        self.eos_token_id = self._ids[_END]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The bytes of ``text``, its markers as one token each."""
        ids: list[int] = []
        for piece in self._split.split(text):
            ids.extend([self._ids[piece]] if piece in self._ids else piece.encode(errors="surrogatepass"))
        return ids

    def decode(self, ids: Sequence[int], **options: object) -> str:
        """The text of ``ids``; what is no UTF-8 becomes a replacement character."""
        pieces = (bytes([id]) if id < _BYTES else str(self.added_tokens_decoder[id]).encode() for id in ids)
        return b"".join(pieces).decode(errors="replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **options: object,
    ) -> str:
        """What the template writes."""
        return str(
            _compiled(self.chat_template).render(
                messages=conversation, tools=tools, add_generation_prompt=add_generation_prompt, **options
            )
        )


@lru_cache(maxsize=1)
def _compiled(template: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template)
