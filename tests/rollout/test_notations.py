# ruff: noqa: E501  the calls are as models write them
from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.notations import NOTATIONS, TAGS, Notation
from asyncrl.rollout.toolcalls import parse_calls, parse_hermes

BY_NAME = {notation.name: notation for notation in NOTATIONS}
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "flag": {"type": "boolean"},
                "items": {"type": "array", "items": {"type": "integer"}},
            },
        },
    },
}


def xml(*pairs: tuple[str, str]) -> str:
    """An XML call of f."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("notation", "text", "calls"),
    [
        ("tags", xml(("text", "12"), ("count", "12"), ("flag", "True")), [("f", {"text": "12", "count": 12, "flag": True})]),
        ("tags", xml(("maybe", "null"), ("items", "[1, 2]")), [("f", {"maybe": None, "items": [1, 2]})]),
        ("tags", xml(("maybe", "12"), ("text", "a\nb")), [("f", {"maybe": "12", "text": "a\nb"})]),
        ("tags", xml(("text", "</tool_call>")), [("f", {"text": "</tool_call>"})]),
        ("tags", xml(), [("f", {})]),
        ("tags", xml() + xml(("count", "1")), [("f", {}), ("f", {"count": 1})]),
        ("tags", "<tool_call>f</tool_call>", [("f", {})]),
        ("tags", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', [("f", {}), ("g", {})]),
        (
            "tags",
            "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>7</arg_value>\n<arg_key>count</arg_key>\n"
            "<arg_value>7</arg_value>\n</tool_call>",
            [("f", {"text": "7", "count": 7})],
        ),
        (
            "pythonic",
            "<|tool_call_start|>[f(text='a, b) [', count=-2, items=[1, 2], flag=true), g()]<|tool_call_end|>",
            [("f", {"text": "a, b) [", "count": -2, "items": [1, 2], "flag": True}), ("g", {})],
        ),
        ("pythonic", '<|tool_call_start|>[f(text="\\d\\n", maybe=None)]<|tool_call_end|>', [("f", {"text": "\\d\n", "maybe": None})]),
        ("python lines", "<function_calls>\nf(count=1)\ng()\n</function_calls>", [("f", {"count": 1}), ("g", {})]),
        ("brackets", '[TOOL_CALLS][{"name": "f", "arguments": {"count": 1}}]', [("f", {"count": 1})]),
        ("brackets", '[TOOL_CALLS]f[ARGS]{"count": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', [("f", {"count": 1}), ("g", {})]),
        ("brackets", '[TOOL_CALLS]f{"text": "{"}', [("f", {"text": "{"})]),
        (
            "call tokens",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"count\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [("f", {"count": 1})],
        ),
        (
            "call tokens",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"count\": 1}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            [("f", {"count": 1})],
        ),
        (
            "quote tokens",
            '<|tool_call>call:f{text:<|"|>a:{b}, "c"<|"|>,items:[1,2],flag:true}<tool_call|>',
            [("f", {"text": 'a:{b}, "c"', "items": [1, 2], "flag": True})],
        ),
        (
            "invoke",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="count">3</parameter>\n</invoke>\n</minimax:tool_call>',
            [("f", {"count": 3})],
        ),
        (
            "channels",
            '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.f '
            '<|constrain|>json<|message|>{"count": 1}',
            [("f", {"count": 1})],
        ),
        ("action", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"count": 1}}]<|END_ACTION|>', [("f", {"count": 1})]),
        ("bare JSON", '{"name": "f", "parameters": {"count": 1}}', [("f", {"count": 1})]),
        ("bare JSON", '<|python_tag|>{"name": "f", "arguments": {}}; {"name": "g"}', [("f", {}), ("g", {})]),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_notation_of_the_model(
    notation: str, text: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    """Values have the types that the tool's schema wants, where the notation does not say."""
    turn = parse_calls("" + text, BY_NAME[notation], tools=[SCHEMA])
    assert [(call.name, call.arguments) for call in turn.tool_calls] == calls
    assert len({call.id for call in turn.tool_calls}) == len(calls)
    assert len(turn.message["tool_calls"]) == len(calls)


@pytest.mark.parametrize(
    ("notation", "text", "reason"),
    [
        ("tags", "<tool_call><function=f>", "not closed"),
        ("pythonic", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "not all given by name"),
        ("pythonic", "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>", "malformed|list of calls"),
        ("pythonic", "<|tool_call_start|>[f(a=1<|tool_call_end|>", "list of calls"),
        ("pythonic", "<|tool_call_start|>[f(a=1)]", "not closed"),
        ("brackets", "[TOOL_CALLS][{]", "not JSON"),
        ("quote tokens", "<|tool_call>call:f{a:<tool_call|>", "not JSON"),
        ("invoke", "<minimax:tool_call>f()</minimax:tool_call>", "invoke"),
        ("channels", "<|channel|>commentary to=functions.f<|message|>{", "not JSON"),
        ("bare JSON", '{"name": "f", "parameters": {"a": }}', "not JSON"),
        ("bare JSON", '{"name": "f", "parameters": 7}', "not an object"),
    ],
)
def test_what_cannot_be_read_is_never_silently_no_call(notation: str, text: str, reason: str) -> None:
    """It is a call without arguments, whose error says precisely why, and stays in the content."""
    (call,) = parse_calls(text, BY_NAME[notation], tools=[SCHEMA]).tool_calls
    assert call.arguments is None
    assert any(part in call.error for part in reason.split("|"))


@pytest.mark.parametrize("text", ["42", '{"answer": 42}', "A name: {", '{"name": "Ann", "age": 7, "x": 1, "y": 2}', ""])
@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda notation: notation.name)
def test_an_answer_is_no_call(notation: Notation, text: str) -> None:
    """Also one that happens to be JSON."""
    turn = parse_calls(text, notation)
    assert turn.tool_calls == ()
    assert turn.message == {"role": "assistant", "content": text}


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([10**22, -(10**30), 2**63, 1.5])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["</tool_call>", "<tool_call>", "</think>", "<think>", "<tool_call>{}</tool_call>", "}}</tool_call>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=50, deadline=None, derandomize=True)
@given(arguments=st.lists(st.dictionaries(st.text("abc", max_size=3), values, max_size=3), min_size=1, max_size=3))
@pytest.mark.parametrize("thinking", ["", "<think>Hm <tool_call>no</tool_call></think>", "Hm</think>"])
def test_arguments_may_hold_anything_that_json_has(thinking: str, arguments: list[dict[str, Any]]) -> None:
    """Tags of calls and of reasoning, and integers of any size: what was written is what is called."""
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': f'f{index}', 'arguments': one}, ensure_ascii=bool(index % 2))}\n</tool_call>"
        for index, one in enumerate(arguments)
    )
    turn = parse_hermes(thinking + text, thinking=thinking.startswith("Hm"))
    assert [(call.name, call.arguments, call.error) for call in turn.tool_calls] == [
        (f"f{index}", one, "") for index, one in enumerate(arguments)
    ]
    assert turn.message["content"] == thinking


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=st.lists(
        st.sampled_from(
            [*"{}[](),:'\"\\<>\n ", "<think>", "</think>", "name", "f", "1", "<|message|>", "[ARGS]", "\ud800", "9" * 5000]
            + [notation.marker for notation in NOTATIONS]
            + ["</tool_call>", "<function=f>", "</function>", "<parameter=a>", "<arg_key>", "<|tool_call_end|>"]
        ),
        max_size=12,
    ).map("".join)
)  # fmt: skip
def test_nothing_that_a_model_writes_raises(text: str) -> None:
    """In any notation; what is no call stays in the content."""
    for notation in NOTATIONS:
        for thinking in (False, True):
            turn = parse_calls(text, notation, tools=[SCHEMA], thinking=thinking)
            assert all((call.arguments is None) == bool(call.error) for call in turn.tool_calls)


@pytest.mark.parametrize(
    "piece", ["<tool_call>{", '<tool_call>{"a": "', "</think><tool_call>", "<think>", '{"', "[[", "f("]
)
@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda notation: notation.name)
@pytest.mark.timeout(5)
def test_reading_takes_time_in_proportion_to_the_text(notation: Notation, piece: str) -> None:
    """Of a hundred thousand characters of broken calls."""
    parse_calls(notation.marker + piece * (100_000 // len(piece)), notation)


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        ("I use <think> to think, and </think> to end it. <tool_call>{\"name\": \"f\"}</tool_call>", "I use <think> to think, and </think> to end it.", True),
        ("Say <think>. <tool_call>{\"name\": \"f\"}</tool_call>", "Say <think>.", True),
        ("<think>Hm</think> Say </think>. <tool_call>{\"name\": \"f\"}</tool_call>", "<think>Hm</think> Say </think>.", True),
        ("<think>Hm <tool_call>{\"name\": \"f\"}</tool_call>", "<think>Hm <tool_call>{\"name\": \"f\"}</tool_call>", False),
    ],
)  # fmt: skip
def test_only_what_stands_in_front_is_reasoning(text: str, content: str, called: bool) -> None:
    """An answer may mention its tags."""
    turn = parse_calls(text, TAGS)
    assert bool(turn.tool_calls) == called
    assert turn.message["content"] == content
