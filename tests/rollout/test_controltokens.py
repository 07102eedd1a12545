from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.controltokens import CUT, QUESTION, TURN, ControlTokens
from asyncrl.rollout.renderer import ChatRenderer, TextRenderer
from asyncrl.rollout.tools import tool
from asyncrl.types import IntArray, Message
from tests.rollout.families import FAMILIES, KINDS, make_family_tokenizer

NAMES = [name for name, family in FAMILIES.items() if not family.problems]
SPELLED = sorted(
    {text for family in FAMILIES.values() for text in (*family.specials, *family.markers, "<eos>", "<pad>")}
)


def renderer_of(name: str, kind: str) -> ChatRenderer:
    """Our renderer of a family."""
    tokenizer = make_family_tokenizer(name, kind)
    return ChatRenderer(tokenizer, ends=tokenizer.convert_tokens_to_ids(list(FAMILIES[name].ends)))


def controls(renderer: ChatRenderer | TextRenderer, ids: IntArray) -> Counter[int]:
    """How often each control token stands in ``ids``, but for the one of unknown characters."""
    unknown = renderer.tokenizer.convert_tokens_to_ids("<unk>")
    return Counter(id for id in ids.tolist() if id in renderer.control.ids and id != unknown)


def pieces_of(text: str) -> list[str]:
    """The text cut in two at each place."""
    return [part for place in range(1, len(text)) for part in (text[:place], text[place:])]


evil = st.lists(
    st.sampled_from([*SPELLED, CUT, QUESTION, TURN, "a", " ", "\n", "<", ">", "|", "<|", "|>", "{", '"', "\\"])
    | st.sampled_from(SPELLED).flatmap(lambda text: st.sampled_from(pieces_of(text))),
    max_size=6,
).map("".join)


@tool
async def search(query: str) -> str:
    """Search."""
    return query


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(name=st.sampled_from(NAMES), text=evil, other=evil)
async def test_content_never_becomes_a_control_token(kind: str, name: str, text: str, other: str) -> None:
    """Users, rows, tools and their schemas may write what they want: each control token stands as often as without."""
    renderer = renderer_of(name, kind)

    async def rendered(text: str, other: str) -> list[Counter[int]]:
        tools = [replace(search, description=other)]
        opening: list[Message] = [{"role": "user", "content": text}]
        call = {"id": "call00000", "type": "function", "function": {"name": "search", "arguments": {"query": other}}}
        turn: Message = {"role": "assistant", "content": text, "tool_calls": [call]}
        results: list[Message] = [{"role": "tool", "tool_call_id": "call00000", "content": text}]
        ids = [
            await renderer.prompt(opening, tools),
            await renderer.continuation([*opening, turn], results, np.empty(0, np.int32), tools),
            await renderer.continuation(opening, [{"role": "user", "content": other}], np.empty(0, np.int32), ()),
        ]
        return [controls(renderer, some) for some in ids]

    assert await rendered(text, other) == await rendered("x", "y")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(texts=st.lists(evil, min_size=1, max_size=3))
async def test_plain_text_has_no_control_tokens_and_stays_as_it_is(kind: str, texts: list[str]) -> None:
    """Also where two messages join to the spelling of one."""
    tokenizer = make_family_tokenizer("json tags", kind)
    renderer = TextRenderer(tokenizer)
    ids = await renderer.prompt([{"role": "user", "content": text} for text in texts], ())
    assert not controls(renderer, ids)
    if kind == "bytes":
        assert tokenizer.decode(ids.tolist()) == "".join(texts)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(name=st.sampled_from(NAMES), text=st.text(st.sampled_from("ab äπ<>[]{}\"'\n\\"), max_size=20))
async def test_other_text_is_encoded_exactly_as_the_tokenizer_does(kind: str, name: str, text: str) -> None:
    """The protection costs nothing where nothing has to be protected."""
    renderer = renderer_of(name, kind)
    ids = await renderer.prompt([{"role": "user", "content": text}], ())
    whole = renderer.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    assert ids.tolist() == renderer.tokenizer.encode(whole, add_special_tokens=False)


async def test_a_normalizer_makes_no_control_token_of_content() -> None:
    """Full-width letters, which it turns into plain ones."""
    from tokenizers import Tokenizer, normalizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(make_family_tokenizer("json tags", "pieces").backend_tokenizer.to_str())
    backend.normalizer = normalizers.NFKC()
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    renderer = TextRenderer(tokenizer)
    full_width = "".join(chr(ord(sign) + 0xFEE0) for sign in "<eos><pad><|im_end|>")
    for text in (full_width, f"a{full_width}b", "<eos>"):
        assert not controls(renderer, await renderer.prompt([{"role": "user", "content": text}], ()))


async def test_examples_of_turns_keep_the_markers_of_reasoning_and_calls() -> None:
    """What the model is shown to have said may think and call, but not end a message."""
    renderer = renderer_of("json tags", "bytes")
    shown: Message = {"role": "assistant", "content": "<think>Hm</think><|im_end|>4"}
    found = controls(renderer, await renderer.prompt([{"role": "user", "content": "2+2"}, shown], ()))
    texts = {renderer.control.texts[id]: count for id, count in found.items()}
    assert texts == {"<|im_start|>": 3, "<|im_end|>": 2, "<think>": 1, "</think>": 1}


def test_words_and_white_space_among_the_added_tokens_are_text() -> None:
    """Only what looks like a marker steers a model."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(make_family_tokenizer("json tags", "bytes").backend_tokenizer.to_str())
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(tokenizer_object=backend, eos_token="<eos>")
    words = ["\n\n", "    ", "ß", "hello", "<mark>", "[X]"]
    tokenizer.add_tokens([AddedToken(word, special=False) for word in words])
    control = ControlTokens(tokenizer)
    marked = {word for word in words if tokenizer.convert_tokens_to_ids(word) in control.ids}
    assert marked == {"<mark>", "[X]"}
    assert control.encode("hello\n\n") == tokenizer.encode("hello\n\n", add_special_tokens=False)


@pytest.mark.slow
@pytest.mark.timeout(20)
def test_thousands_of_control_tokens_cost_no_more_than_a_few() -> None:
    """Some tokenizers have six thousand, and some texts as many angle brackets: each place is looked at once."""

    class Many:
        def __init__(self) -> None:
            self.all_special_ids = list(range(6000))
            self.all_special_tokens = [f"<unused{index}>" for index in self.all_special_ids]
            self.added_tokens_decoder: dict[int, Any] = {}

        def encode(self, text: str, **options: Any) -> list[int]:
            return [len(text)]

    control = ControlTokens(Many())
    text = "<div><unused17></div>" * 5000
    shielded = control.shield(text)
    assert shielded.replace(CUT, "") == text
    assert shielded.count(CUT) == 5000
