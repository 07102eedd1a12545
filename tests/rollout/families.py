"""Chat templates in the habits of the families of models, each as short as its habit allows, and tokenizers of each
kind: byte-level BPE, unigram pieces with byte fallback, one token a character."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["FAMILIES", "KINDS", "Family", "make_family_tokenizer"]

KINDS = ("characters", "bytes", "pieces")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One habit."""

    template: str
    specials: tuple[str, ...]
    markers: tuple[str, ...] = ()
    """Added tokens that the tokenizer does not call special."""
    eos: str
    ends: tuple[str, ...] = ()
    """What its generation config lists beside."""
    turn: str
    """How its model calls ``add`` with a=2, b="x y", as sampled, the end token included."""
    problems: tuple[str, ...] = ()
    """What its template does not carry through."""
    fatal: bool = False


_HEAD = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
_GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_IM = ("<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def _chatml(call: str, *, head: str = _HEAD, result: str = "{{ m.content }}", generate: str = _GENERATE) -> str:
    """ChatML; ``call`` writes the call ``c``, ``result`` the message ``m`` of a tool."""
    return (
        head + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'tool' %}" + result + "{% else %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}" + generate
    )


_JSON_CALL = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
)
_XML_CALL = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
_PYTHON_CALL = (
    "{{ '<|tool_call_start|>[' if loop.first else ', ' }}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}="
    "{{ \"'\" ~ v ~ \"'\" if v is string else v }}{% endfor %}){{ ']<|tool_call_end|>' if loop.last }}"
)
_THINKING = _GENERATE.replace("assistant\n", "assistant\n<think>\n")

_KEYED = (
    "[gMASK]{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_BARE = (
    "<bos>{% for m in messages %}{% if loop.first and tools %}"
    "<|header|>system<|/header|>\n\n{{ tools | tojson }}<|eot|>"
    "{% endif %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}"
    "{% endif %}<|header|>assistant<|/header|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot|>{% else %}<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/header|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
_BRACKETS = (
    "<bos>{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '[RESULT]{"content": {{ m.content | tojson }}, "id": "{{ m.tool_call_id }}"}[/RESULT]'
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('nine characters') }}{% endif %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]<eos>{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
_FORWARD = (
    "<bos>{% if tools %}<|turn>system\n{% for t in tools %}<|tool>{{ t.function.name }}<tool|>{% endfor %}<turn|>\n"
    "{% endif %}{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if not ns.open %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}{% set ns.open = false %}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    "{% for k, v in c.function.arguments.items() %}{{ ',' if not loop.first }}{{ k }}:"
    "{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
    "{% if m.tool_calls %}{% set ns.open = true %}{% for r in messages[loop.index:] %}{% if r.role == 'tool' %}"
    "{% for c in m.tool_calls %}{% if c.id == r.tool_call_id %}<|tool_response>response:{{ c.function.name }}"
    '{value:<|"|>{{ r.content }}<|"|>}<tool_response|>{% endif %}{% endfor %}{% endif %}{% endfor %}{% endif %}'
    "{{ m.content }}{% if not ns.open %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}"
)
_CHANNELS = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% set ns = namespace(last='') %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not ns.last %}{{ raise_exception('no call before') }}{% endif %}"
    "<|start|>functions.{{ ns.last }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}{% set ns.last = m.tool_calls[0].function.name %}<|start|>assistant<|channel|>commentary "
    "to=functions.{{ ns.last }} <|constrain|>json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_FENCED = (
    "<bos>{% if tools %}{{ tools | tojson }}\n\n{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜Assistant｜>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<｜tool▁calls▁begin｜>' if loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}<｜tool▁call▁end｜>"
    "{{ '<｜tool▁calls▁end｜>' if loop.last }}{% endfor %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}"
)

_ARGUMENTS = '{"a": 2, "b": "x y"}'
_TAGGED = f'<tool_call>{{"name": "add", "arguments": {_ARGUMENTS}}}</tool_call><|im_end|>'
FAMILIES: Mapping[str, Family] = {
    "json tags": Family(template=_chatml(_JSON_CALL), specials=_IM, markers=_TAGS, eos="<|im_end|>", turn=_TAGGED),
    "json tags, reasoning": Family(
        template=_chatml(_JSON_CALL, generate=_THINKING),
        specials=_IM,
        markers=_TAGS,
        eos="<|im_end|>",
        turn="Hm </think>" + _TAGGED,
    ),
    "xml tags": Family(
        template=_chatml(_XML_CALL),
        specials=_IM,
        markers=_TAGS,
        eos="<|im_end|>",
        turn="<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nx y\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>",
    ),
    "keyed tags": Family(
        template=_KEYED,
        specials=("[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        markers=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<eos>",
        ends=("<|user|>", "<|observation|>"),
        turn="<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>x y</arg_value>\n</tool_call><|observation|>",
    ),
    "python": Family(
        template=_chatml(_PYTHON_CALL),
        specials=(*_IM, "<|tool_call_start|>", "<|tool_call_end|>"),
        eos="<|im_end|>",
        turn="<|tool_call_start|>[add(a=2, b='x y')]<|tool_call_end|><|im_end|>",
    ),
    "bare json": Family(
        template=_BARE,
        specials=("<|header|>", "<|/header|>", "<|eot|>", "<|python_tag|>"),
        eos="<|eot|>",
        turn=f'{{"name": "add", "parameters": {_ARGUMENTS}}}<|eot|>',
    ),
    "brackets": Family(
        template=_BRACKETS,
        specials=("[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[TOOL_CALLS]", "[RESULT]", "[/RESULT]"),
        eos="<eos>",
        turn=f'[TOOL_CALLS][{{"name": "add", "arguments": {_ARGUMENTS}, "id": "abcdefghi"}}]<eos>',
    ),
    "forward": Family(
        template=_FORWARD,
        specials=(
            "<|turn>",
            "<turn|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            '<|"|>',
        ),
        eos="<eos>",
        ends=("<turn|>", "<|tool_response>"),
        turn='<|tool_call>call:add{a:2,b:<|"|>x y<|"|>}<tool_call|><|tool_response>',
    ),
    "channels": Family(
        template=_CHANNELS,
        specials=(*("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),),
        eos="<|return|>",
        ends=("<|call|>",),
        turn=f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
    ),
    "fenced": Family(
        template=_FENCED,
        specials=(
            *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        eos="<eos>",
        turn="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        f"{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><eos>",
    ),
    "no announcement": Family(
        template=_chatml(_JSON_CALL, head=""),
        specials=_IM,
        markers=_TAGS,
        eos="<|im_end|>",
        turn=_TAGGED,
        problems=("tools_not_announced",),
        fatal=True,
    ),
    "no calls": Family(
        template=_chatml(""),
        specials=_IM,
        markers=_TAGS,
        eos="<|im_end|>",
        turn=_TAGGED,
        problems=("calls_not_written",),
    ),
    "unknown notation": Family(
        template=_chatml("CALL {{ c.function.name }} WITH {{ c.function.arguments | tojson }} NOW"),
        specials=_IM,
        eos="<|im_end|>",
        turn="CALL add WITH {} NOW<|im_end|>",
        problems=("calls_not_read",),
        fatal=True,
    ),
    "no results": Family(
        template=_chatml(_JSON_CALL, result="a tool was called"),
        specials=_IM,
        markers=_TAGS,
        eos="<|im_end|>",
        turn=_TAGGED,
        problems=("results_not_written",),
        fatal=True,
    ),
    "no tool role": Family(
        template=_chatml(_JSON_CALL, result="{{ raise_exception('users and assistants only') }}"),
        specials=_IM,
        markers=_TAGS,
        eos="<|im_end|>",
        turn=_TAGGED,
        problems=("results_not_written",),
        fatal=True,
    ),
}

_CORPUS = [
    'the sum of 2 and 40 is 42 {"name": "add", "arguments": {"a": 2, "b": "x y"}} user assistant system tool function',
    "I think that the answer is right because it was computed. <function=add> <parameter=a> response:add content",
] * 8


@cache
def make_family_tokenizer(name: str, kind: str) -> Any:
    """The tokenizer of a family; the same kind of tokenizer differs in its added tokens only."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    specials = ["<pad>", "<bos>", "<eos>", *family.specials]
    backend = _MAKERS[kind](specials)
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token=family.eos)
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in family.markers])
    tokenizer.chat_template = family.template
    return tokenizer


def _characters(specials: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = [chr(code) for code in range(32, 127)] + ["\n", "ä", "｜", "▁"]
    vocabulary = {token: index for index, token in enumerate([*specials, "<unk>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _bytes(specials: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _pieces(specials: list[str]) -> Any:
    """As converted from sentencepiece: its control pieces stand in the vocabulary, where the model could find them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator([*_CORPUS, "".join(map(chr, range(33, 127)))], trainer)
    state = json.loads(backend.to_str())
    learned = [entry for entry in state["model"]["vocab"] if entry[0] not in specials]
    fallback = [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    state["model"]["vocab"] = [*learned, *([special, 0.0] for special in specials), *fallback]
    state["model"]["byte_fallback"] = True
    backend = Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


_MAKERS: Mapping[str, Callable[[list[str]], Any]] = {"characters": _characters, "bytes": _bytes, "pieces": _pieces}
