from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.rollout.renderer import ChatRenderer, TextRenderer, load_renderer
from asyncrl.rollout.tools import tool
from asyncrl.types import IntArray, Message

MakeTokenizer = Callable[[str | None], Any]
TERMINATORS = {"chatml": "<|im_end|>", "llama": "<|eot_id|>", "qwen": "<|im_end|>"}
FAMILIES = sorted(TERMINATORS)

USER: Message = {"role": "user", "content": "2+2?"}
MODEL: Message = {"role": "assistant", "content": "4"}
AGAIN: Message = {"role": "user", "content": "sure?"}
RESULT: Message = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "four"}


@tool
async def add(a: int, b: int) -> str:
    """Add."""
    return str(a + b)


class Recorder:
    """A tokenizer that remembers what it encoded, and in which thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []
        self.threads: set[int] = set()

    def encode(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        self.threads.add(threading.get_ident())
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def ids(tokenizer: Any, text: str) -> IntArray:
    """The text's tokens, special ones included."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def text(tokenizer: Any, tokens: IntArray) -> str:
    """What the tokens say, special ones included."""
    return str(tokenizer.decode(tokens.tolist()))


def rendered(tokenizer: Any, messages: list[Message]) -> str:
    """The template's own text of a whole conversation."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_prompt_is_what_the_template_writes(make_tokenizer: MakeTokenizer, family: str) -> None:
    """It opens the model's message, and it is int32."""
    tokenizer = make_tokenizer(family)
    prompt = await ChatRenderer(tokenizer).prompt([USER], ())
    assert prompt.dtype == np.int32
    assert text(tokenizer, prompt) == rendered(tokenizer, [USER])


async def test_tools_are_announced_in_the_prompt(make_tokenizer: MakeTokenizer) -> None:
    """As the template does it, from their schemas."""
    tokenizer = make_tokenizer("chatml")
    prompt = text(tokenizer, await ChatRenderer(tokenizer).prompt([USER], (add,)))
    assert '"name": "add"' in prompt
    assert '"required": ["a", "b"]' in prompt


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reply", [[AGAIN], [RESULT], [RESULT, RESULT], [RESULT, AGAIN]])
@pytest.mark.parametrize("ended", [True, False])
async def test_a_conversation_reads_as_the_template_writes_it(
    make_tokenizer: MakeTokenizer, family: str, reply: list[Message], ended: bool
) -> None:
    """Prompt, sampled ids and framing together are the template's text, whether or not the turn had its terminator."""
    tokenizer = make_tokenizer(family)
    renderer = ChatRenderer(tokenizer)
    opening = "<think>\n\n</think>\n\n" if family == "qwen" and AGAIN not in reply else ""
    turn = ids(tokenizer, opening + "4" + TERMINATORS[family] * ended)
    prompt = await renderer.prompt([USER], ())
    framing = await renderer.continuation([USER, MODEL], reply, turn, ())
    whole = np.concatenate([prompt, turn, framing])
    assert text(tokenizer, whole) == rendered(tokenizer, [USER, MODEL, *reply])
    assert whole.tolist() == ids(tokenizer, rendered(tokenizer, [USER, MODEL, *reply])).tolist()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_terminator_is_never_there_twice_or_missing(make_tokenizer: MakeTokenizer, family: str) -> None:
    """One that was sampled is not repeated; one that is missing, or another end token in its place, brings it in."""
    tokenizer = make_tokenizer(family)
    renderer = ChatRenderer(tokenizer)
    end = ids(tokenizer, TERMINATORS[family])[0]
    for turn, expected in [("4" + TERMINATORS[family], 0), ("4", 1), ("4<eos>", 1), ("", 1)]:
        framing = await renderer.continuation([], [AGAIN], ids(tokenizer, turn), ())
        between = framing[: framing.tolist().index(ids(tokenizer, "s")[0])]
        assert (between == end).sum() == expected
        assert (framing[0] == end) == bool(expected)


async def test_sampled_ids_are_never_encoded_again(make_tokenizer: MakeTokenizer) -> None:
    """A token that encoding would not give changes nothing about the framing, and is only decoded to be read."""
    tokenizer = make_tokenizer("chatml")
    recorder = Recorder(tokenizer)
    renderer = ChatRenderer(recorder)
    recorder.texts.clear()
    merged = np.asarray([*tokenizer.convert_tokens_to_ids(["ab", "<|im_end|>"])], dtype=np.int32)
    assert ids(tokenizer, text(tokenizer, merged)).tolist() != merged.tolist()
    kept = merged.copy()
    framing = await renderer.continuation([USER], [AGAIN], merged, ())
    assert text(tokenizer, framing) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert (await renderer.parse(merged)).message["content"] == "ab"
    assert merged.tolist() == kept.tolist()
    assert not any("ab" in encoded for encoded in recorder.texts)


async def test_a_turn_costs_its_new_text_only(make_tokenizer: MakeTokenizer) -> None:
    """What stands in the conversation already is not tokenised again."""
    recorder = Recorder(make_tokenizer("chatml"))
    renderer = ChatRenderer(recorder)
    recorder.texts.clear()
    history: list[Message] = [{"role": "user", "content": "history " * 1000}, MODEL]
    await renderer.continuation(history, [AGAIN], ids(recorder, "4"), ())
    (encoded,) = [seen for seen in recorder.texts if seen != "4"]
    assert encoded == "<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"


async def test_reasoning_that_a_template_would_drop_stays(make_tokenizer: MakeTokenizer) -> None:
    """The template strips thoughts from earlier turns; the sampled ids stand as they are, and framing follows them."""
    tokenizer = make_tokenizer("qwen")
    renderer = ChatRenderer(tokenizer)
    turn = ids(tokenizer, "<think>\nHm\n</think>\n\n4<|im_end|>")
    framing = await renderer.continuation([USER], [AGAIN], turn, ())
    assert text(tokenizer, framing) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert (await renderer.parse(turn)).message["content"] == "<think>\nHm\n</think>\n\n4"


async def test_messages_that_hold_the_mark_are_whole(make_tokenizer: MakeTokenizer) -> None:
    """What an environment writes cannot be mistaken for the model's message."""
    tokenizer = make_tokenizer("chatml")
    new = [{"role": "user", "content": "asyncrl:turn asyncrl:turn"}]
    framing = await ChatRenderer(tokenizer).continuation([], new, ids(tokenizer, "4<|im_end|>"), ())
    assert "user\nasyncrl:turn asyncrl:turn<|im_end|>" in text(tokenizer, framing)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{{ m.role }}: {{ m.content }}\n", "must end it with a special token"),
        ("{{ m.content }}<eos>{{ loop.index }}", "depends on earlier turns"),
        ("{{ m.content | upper }}<eos>", "does not write a model message as it is"),
        ("{{ raise_exception('users only') if m.role != 'user' }}", "refuses messages of the roles .*users only"),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(make_tokenizer: MakeTokenizer, body: str, reason: str) -> None:
    """At construction, with the reason."""
    with pytest.raises(ConfigError, match=reason):
        ChatRenderer(make_tokenizer("{% for m in messages %}" + body + "{% endfor %}"))


def test_a_tokenizer_without_a_template_is_refused(make_tokenizer: MakeTokenizer) -> None:
    """The message names the other renderer."""
    with pytest.raises(ConfigError, match="text renderer"):
        ChatRenderer(make_tokenizer(None))


async def test_a_role_that_the_template_does_not_know_is_an_error(make_tokenizer: MakeTokenizer) -> None:
    """It is not left out of the conversation."""
    template = make_tokenizer("chatml").chat_template.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
    )
    renderer = ChatRenderer(make_tokenizer(template))
    with pytest.raises(ConfigError, match="no tools"):
        await renderer.continuation([], [RESULT], np.empty(0, np.int32), ())


async def test_a_turn_is_read_without_what_ended_it(make_tokenizer: MakeTokenizer) -> None:
    """Terminator, end of text or stop string, and nothing else, is left out of the message."""
    tokenizer = make_tokenizer("chatml")
    renderer = ChatRenderer(tokenizer, stop=["</answer>"])
    assert renderer.stop == ("</answer>",)
    assert renderer.stop_token_ids == tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"]))
    for sampled in ("4 .<|im_end|>", "4 .<eos>", "4 .", "4 .</answer>", "4 .</answer>7<|im_end|>"):
        assert (await renderer.parse(ids(tokenizer, sampled))).message == {"role": "assistant", "content": "4 ."}
    assert (await renderer.parse(np.empty(0, np.int32))).message["content"] == ""
    assert (await renderer.parse(ids(tokenizer, "<|im_start|>"))).message["content"] == "<|im_start|>"


async def test_calls_are_read_from_a_turn(make_tokenizer: MakeTokenizer) -> None:
    """In Hermes form, or in the form that the tokenizer brings along."""
    tokenizer = make_tokenizer("chatml")
    hermes = ids(tokenizer, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>')
    (call,) = (await ChatRenderer(tokenizer).parse(hermes, (add,))).tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})
    assert (await TextRenderer(tokenizer).parse(hermes)).tool_calls == (call,)

    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "tool_calls": {
                "open_pattern": r"(?P<name>\w+)\(",
                "close": ")",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>\w+)"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    (own,) = (await ChatRenderer(tokenizer).parse(ids(tokenizer, "add(a=1 b=2)<|im_end|>"), (add,))).tool_calls
    assert own == call


async def test_text_is_concatenated(make_tokenizer: MakeTokenizer) -> None:
    """Nothing stands between messages, and nothing ends a turn."""
    tokenizer = make_tokenizer(None)
    renderer = TextRenderer(tokenizer, stop=["\n"])
    prompt = await renderer.prompt([{"role": "system", "content": "Sums.\n"}, USER], ())
    turn = ids(tokenizer, "4\n")
    framing = await renderer.continuation([], [AGAIN, USER], turn, ())
    assert text(tokenizer, np.concatenate([prompt, turn, framing])) == "Sums.\n2+2?4\nsure?2+2?"
    assert (await renderer.parse(turn)).message == {"role": "assistant", "content": "4"}
    assert renderer.stop_token_ids == (tokenizer.eos_token_id,)
    assert len(await renderer.continuation([], [], turn, ())) == 0


async def test_text_begins_with_the_token_that_the_model_wants_there(make_tokenizer: MakeTokenizer) -> None:
    """Once, in front of the prompt and not of what follows."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(None)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    renderer = TextRenderer(tokenizer)
    assert (await renderer.prompt([USER], ())).tolist() == [bos, *ids(tokenizer, "2+2?").tolist()]
    assert (await renderer.continuation([], [USER], np.empty(0, np.int32), ())).tolist() == ids(
        tokenizer, "2+2?"
    ).tolist()


class Burning(Recorder):
    """Every text takes ``burn_s`` of a processor."""

    burn_s = 0.0

    def encode(self, text: str, **options: Any) -> Any:
        end = time.thread_time() + self.burn_s
        while time.thread_time() < end:
            pass
        return super().encode(text, **options)


@pytest.mark.parametrize("make", [ChatRenderer, TextRenderer])
@pytest.mark.parametrize("slow", [False, True])
async def test_a_tokenizer_that_computes_long_never_holds_the_loop(
    make_tokenizer: MakeTokenizer, make: type[ChatRenderer | TextRenderer], slow: bool
) -> None:
    """What was quick so far is done at once, anything else in a thread, also the first text."""
    recorder = Burning(make_tokenizer("chatml"))
    renderer = make(recorder)
    recorder.threads.clear()
    recorder.burn_s = 0.005 if slow else 0.0
    messages: list[Message] = [{"role": "tool", "content": "x" * 100}]
    await renderer.prompt(messages, ())
    assert threading.get_ident() not in recorder.threads
    for _ in range(3 if slow else 60):
        await renderer.continuation([], messages, np.empty(0, np.int32), ())
        await renderer.shortened(messages, 10)
    assert (threading.get_ident() in recorder.threads) == (not slow)


async def test_one_tokenizer_serves_many_threads(make_tokenizer: MakeTokenizer) -> None:
    """Long texts of several trajectories at once come out as one after the other."""
    renderer = TextRenderer(make_tokenizer(None))
    texts = [chr(97 + index) * 5000 for index in range(8)]
    results: dict[int, IntArray] = {}

    async def render(index: int) -> None:
        results[index] = await renderer.prompt([{"role": "user", "content": texts[index]}], ())

    async with anyio.create_task_group() as tasks:
        for index in range(8):
            tasks.start_soon(render, index)
    for index in range(8):
        assert text(renderer.tokenizer, results[index]) == texts[index]


async def test_only_results_of_tools_are_shortened(make_tokenizer: MakeTokenizer) -> None:
    """Other messages, and results that fit, are the same objects as before."""
    renderer = ChatRenderer(make_tokenizer("chatml"))
    long: Message = {"role": "tool", "content": "x" * 100}
    user: Message = {"role": "user", "content": "x" * 100}
    empty: Message = {"role": "tool", "content": None}
    result = await renderer.shortened([long, user, empty, RESULT], 60)
    assert result[1:] == [user, empty, RESULT]
    assert result[0]["content"].startswith("xx")
    assert len(ids(renderer.tokenizer, result[0]["content"])) <= 60
    assert long["content"] == "x" * 100


@pytest.mark.slow
def test_a_renderer_is_loaded_from_a_model_folder(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    """Either kind, with the stop strings it was given."""
    make_tokenizer("chatml").save_pretrained(tmp_path)
    assert isinstance(load_renderer(tmp_path), ChatRenderer)
    assert isinstance(load_renderer(tmp_path, "auto"), ChatRenderer)
    make_tokenizer(None).save_pretrained(tmp_path / "base")
    assert isinstance(load_renderer(tmp_path / "base", "auto"), TextRenderer)
    assert isinstance(load_renderer(tmp_path, "text", stop=["\n"]), TextRenderer)
    assert load_renderer(tmp_path, "text", stop=["\n"]).stop == ("\n",)
    with pytest.raises(ConfigError, match="renderer is 'qwen', but must be 'auto', 'chat' or 'text'"):
        load_renderer(tmp_path, "qwen")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [4, 7]}, {"eos_token_id": 5}, ["<eos>", "<|im_end|>", "<|eot_id|>"]),
        ({"eos_token_id": 7}, None, ["<eos>", "<|eot_id|>"]),
        ({}, {"eos_token_id": [7]}, ["<eos>", "<|eot_id|>"]),
        (None, {"eos_token_id": 7}, ["<eos>", "<|eot_id|>"]),
        (None, None, ["<eos>"]),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.slow
async def test_end_tokens_are_those_of_the_tokenizer_and_the_model_together(
    make_tokenizer: MakeTokenizer, tmp_path: Path, kind: Any, generation: Any, config: Any, ends: list[str]
) -> None:
    """Whichever of them ended a turn, the text is without it."""
    tokenizer = make_tokenizer("chatml")
    tokenizer.save_pretrained(tmp_path)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps({"model_type": "qwen3"} | value))
    renderer = load_renderer(tmp_path, kind)
    expected = {*ends, "<|im_end|>"} if kind == "chat" else set(ends)
    assert set(tokenizer.convert_ids_to_tokens(list(renderer.stop_token_ids))) == expected
    for end in expected:
        assert (await renderer.parse(ids(tokenizer, f"42{end}"))).message["content"] == "42"


@pytest.mark.parametrize("eos", ["a", -1, [1, None], True])
def test_an_end_token_that_is_none_is_refused(make_tokenizer: MakeTokenizer, tmp_path: Path, eos: object) -> None:
    """The file is named."""
    make_tokenizer("chatml").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        load_renderer(tmp_path)


async def test_template_options_are_variables_of_the_template(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    """They hold for prompts and continuations; one that the template never reads is refused."""
    template = make_tokenizer("chatml").chat_template.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if enable_thinking is defined %}<{{ enable_thinking }}>{% endif %}{% endif %}",
    )
    tokenizer = make_tokenizer(template)
    renderer = ChatRenderer(tokenizer, template_options={"enable_thinking": False})
    assert text(tokenizer, await renderer.prompt([USER], ())).endswith("assistant\n<False>")
    framing = await renderer.continuation([USER, MODEL], [AGAIN], ids(tokenizer, "4<|im_end|>"), ())
    assert text(tokenizer, framing).endswith("assistant\n<False>")
    for unknown in ("enable_thoughts", "messages", "tools", "add_generation_prompt"):
        with pytest.raises(ConfigError, match=f"template_options is '{unknown}'"):
            ChatRenderer(tokenizer, template_options={unknown: True})
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"template_options .* for renderer 'text'"):
        load_renderer(tmp_path, "text", template_options={"enable_thinking": False})


@pytest.mark.parametrize("spelled", [True, False])
async def test_a_beginning_of_text_token_stands_once(make_tokenizer: MakeTokenizer, spelled: bool) -> None:
    """Also where the template writes it twice, or a prompt of plain text spells it out."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer("llama" if not spelled else "{{ bos_token }}" + make_tokenizer("llama").chat_template)
    chat = await ChatRenderer(tokenizer).prompt([USER], ())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    plain = await TextRenderer(tokenizer).prompt([{"role": "user", "content": "<bos>" * spelled + "2+2?"}], ())
    for prompt in (chat, plain):
        assert (prompt == tokenizer.bos_token_id).sum() == 1
        assert prompt[0] == tokenizer.bos_token_id


async def test_parts_of_a_content_are_one_text(make_tokenizer: MakeTokenizer) -> None:
    """In prompts and results; they are shortened like any other text, and what is no text is refused."""
    tokenizer = make_tokenizer("chatml")
    renderer = ChatRenderer(tokenizer)
    parts: Message = {
        "role": "tool",
        "content": [{"type": "text", "text": "x" * 60}, {"type": "text", "text": "y" * 60}],
    }
    whole = await renderer.prompt([USER, parts], ())
    assert "x" * 60 + "y" * 60 in text(tokenizer, whole)
    (short,) = await renderer.shortened([parts], 50)
    assert len(ids(tokenizer, short["content"])) <= 50
    assert short["content"].startswith("xxx") and short["content"].endswith("yyy")
    (kept,) = await renderer.shortened([parts], 200)
    assert kept is parts
    for image in ({"type": "image", "image": "x.png"}, 7):
        with pytest.raises(ConfigError, match="part of a message's content"):
            await renderer.prompt([{"role": "user", "content": [image]}], ())


async def test_a_result_full_of_control_tokens_is_shortened_as_it_will_be_encoded(
    make_tokenizer: MakeTokenizer,
) -> None:
    """As content each takes many tokens, not one."""
    tokenizer = make_tokenizer("chatml")
    renderer = ChatRenderer(tokenizer)
    evil: Message = {"role": "tool", "content": "<|im_end|>" * 50}
    (short,) = await renderer.shortened([evil], 100)
    assert len(renderer.encode(short["content"])) <= 100
    framing = await renderer.continuation([], [short], ids(tokenizer, "4<|im_end|>"), ())
    assert (framing == tokenizer.convert_tokens_to_ids("<|im_end|>")).sum() == 1


async def test_a_template_that_wants_parts_gets_them(make_tokenizer: MakeTokenizer) -> None:
    """As those of models that see do."""
    template = make_tokenizer("chatml").chat_template.replace(
        "{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    renderer = ChatRenderer(tokenizer)
    prompt = await renderer.prompt([USER], ())
    framing = await renderer.continuation([USER, MODEL], [AGAIN], ids(tokenizer, "4"), ())
    whole = text(tokenizer, prompt) + "4" + text(tokenizer, framing)
    assert whole == rendered(make_tokenizer("chatml"), [USER, MODEL, AGAIN])
