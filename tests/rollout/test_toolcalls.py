from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.rollout.toolcalls import ParsedTurn, parse_hermes, parse_with_template
from asyncrl.types import ToolCall

Reader = Callable[..., ParsedTurn]


def call(body: str) -> str:
    """That body as a Hermes call."""
    return f"<tool_call>\n{body}\n</tool_call>"


def test_several_calls_are_read_in_their_order() -> None:
    """Each call has its name, arguments and an id of its own; the text around them is the content."""
    turn = parse_hermes(
        "First.\n" + call('{"name": "add", "arguments": {"a": 1}}') + call('{"name": "end", "arguments": {}}')
    )
    assert turn.tool_calls == (
        ToolCall(name="add", arguments={"a": 1}, id="call00000"),
        ToolCall(name="end", arguments={}, id="call00001"),
    )
    assert turn.message["content"] == "First."
    assert turn.message["role"] == "assistant"
    assert turn.message["tool_calls"][0] == {
        "id": "call00000",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 1}},
    }


def test_a_message_without_calls_is_kept_as_it_is() -> None:
    """Spaces included, and without an empty list of calls."""
    assert parse_hermes(" 42\n").message == {"role": "assistant", "content": " 42\n"}


@pytest.mark.parametrize(
    ("body", "name", "error"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "", "not JSON"),
        ("[" * 100_000, "", "not JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "", "not JSON"),
        ('{"arguments": {}}', "", "not an object with a name"),
        ('["add"]', "", "not an object with a name"),
        ('{"name": "add", "arguments": [1]}', "add", "not an object"),
        ('{"name": "add", "arguments": 1}', "add", "not an object"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_with_the_reason(body: str, name: str, error: str) -> None:
    """It has no arguments, stays in the content, and does not hide the calls beside it."""
    turn = parse_hermes(call(body) + call('{"name": "end", "arguments": {}}'))
    bad, good = turn.tool_calls
    assert (bad.name, bad.arguments, bad.id) == (name, None, "call00000")
    assert error in bad.error
    assert good == ToolCall(name="end", arguments={}, id="call00001")
    assert turn.message["content"] == call(body)
    assert [called["id"] for called in turn.message["tool_calls"]] == ["call00001"]


def test_a_call_that_was_cut_off_is_not_run() -> None:
    """Complete JSON without the closing tag is still a call that was not ended."""
    (bad,) = parse_hermes('<tool_call>{"name": "end", "arguments": {}}').tool_calls
    assert bad.arguments is None
    assert "not closed" in bad.error


def test_reasoning_stays_in_the_content_and_its_calls_are_thoughts() -> None:
    """Only what follows the reasoning is called, whether the prompt or the model opened it."""
    thought = call('{"name": "no", "arguments": {}}')
    for opening in ("<think>", ""):
        turn = parse_hermes(f"{opening}{thought}</think>" + call('{"name": "yes", "arguments": {}}'))
        assert [found.name for found in turn.tool_calls] == ["yes"]
        assert turn.message["content"] == f"{opening}{thought}</think>"
    assert parse_hermes(f"<think>{thought}").tool_calls == ()


RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "reasoning_content": {"open": "[think]", "close": "[/think]", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\[call (?P<name>\w+)\]",
            "close": "[/call]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


@pytest.fixture(scope="module")
def read() -> Reader:
    """Reads a text as a tokenizer with that response template does."""
    from transformers.utils.chat_parsing import parse_response

    class Tokenizer:
        def parse_response(self, text: str, **options: Any) -> dict[str, Any]:
            return parse_response(text, RESPONSE_TEMPLATE, **options)

    return lambda text, opening="": parse_with_template(
        Tokenizer(), text, prefix="<|im_start|>assistant\n" + opening, tools=[]
    )


def test_the_tokenizers_own_notation_is_read(read: Reader) -> None:
    """Calls and reasoning are told apart as its response template says, also if the prompt opened the reasoning."""
    turn = read('Hm[/think][call add]{"a": 1}[/call]', opening="[think]")
    assert turn.tool_calls == (ToolCall(name="add", arguments={"a": 1}, id="call00000"),)
    assert turn.message["reasoning_content"] == "Hm"
    assert turn.message["content"] == ""
    assert read("42").message == {"role": "assistant", "content": "42"}


def test_what_the_tokenizer_cannot_read_is_an_unreadable_call(read: Reader) -> None:
    """The text stays whole, and the environment learns that there was a call."""
    turn = read("[call add]{1[/call]")
    assert turn.message == {"role": "assistant", "content": "[call add]{1[/call]"}
    assert turn.tool_calls[0].arguments is None
    assert "JSON" in turn.tool_calls[0].error
    assert read("[call add][1][/call]").tool_calls[0].arguments is None
