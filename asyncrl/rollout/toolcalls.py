"""Reading a model's message: its text, and the tool calls in it.

Two notations: Hermes (``<tool_call>{"name": .., "arguments": {..}}</tool_call>``, which Qwen uses too), and whatever
the tokenizer's own response template describes. A call that cannot be read is kept as a ``ToolCall`` without arguments,
so that the environment can say so to the model; nothing here raises because of what a model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from asyncrl.types import Message, ToolCall

__all__ = ["ParsedTurn", "parse_hermes", "parse_with_template"]

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_THINK, _END_THINK = "<think>", "</think>"


@dataclass(slots=True, kw_only=True)
class ParsedTurn:
    """One model message: a view of the sampled tokens. Not to be changed, but quick to make."""

    message: Message
    """Role, content and, if any call could be read, ``tool_calls`` in the form that chat templates know."""
    tool_calls: tuple[ToolCall, ...]
    """In the order in which they were written, unreadable ones included."""


def parse_hermes(text: str) -> ParsedTurn:
    """Read Hermes calls. Reasoning stays in the content, as do calls that cannot be read.

    A call inside of reasoning is a thought, not a call. Example::

        parse_hermes('Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        # content "Hm.", one ToolCall(name="add", arguments={"a": 1}, id="call_0")
    """
    reasoning, end, answer = text.rpartition(_END_THINK)
    if _THINK in answer:  # it never stopped thinking
        return _turn({"content": text}, ())
    calls: list[ToolCall] = []

    def read(match: re.Match[str]) -> str:
        body, closing = match.groups()
        call = _read_call(body, id=f"call_{len(calls)}") if closing else _unreadable(len(calls), "it is not closed")
        calls.append(call)
        return match.group() if call.arguments is None else ""

    content = reasoning + end + _CALL.sub(read, answer)
    return _turn({"content": content.strip() if calls else content}, calls)


def parse_with_template(tokenizer: Any, text: str, *, prefix: str, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
    """Read ``text`` with the tokenizer's ``response_template``, which may put reasoning under a key of its own.

    ``prefix`` is the end of the prompt: a template may have written the message's first tokens. ``tools`` are their
    schemas, by which notations without types tell a number from a string.
    """
    try:
        message: Message = tokenizer.parse_response(text, prefix=prefix, tools=list(tools) or None)
    except ValueError as error:
        return _turn({"content": text}, [_unreadable(0, str(error))])
    found = message.pop("tool_calls", None) or []
    calls = [_checked(call.get("function"), id=f"call_{index}") for index, call in enumerate(found)]
    return _turn(message | {"content": message.get("content") or ""}, calls)


def _turn(message: Message, calls: Sequence[ToolCall]) -> ParsedTurn:
    message["role"] = "assistant"
    readable = [call for call in calls if call.arguments is not None]
    if readable:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments or {})},
            }
            for call in readable
        ]
    return ParsedTurn(message=message, tool_calls=tuple(calls))


def _read_call(body: str, *, id: str) -> ToolCall:
    try:
        return _checked(orjson.loads(body), id=id)
    except orjson.JSONDecodeError as error:
        return ToolCall(name="", arguments=None, id=id, error=f"it is not JSON: {error}")


def _checked(call: Any, *, id: str) -> ToolCall:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall(name="", arguments=None, id=id, error="it is not an object with a name")
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return ToolCall(name=name, arguments=None, id=id, error="its arguments are not an object")
    return ToolCall(name=name, arguments=arguments, id=id)


def _unreadable(index: int, error: str) -> ToolCall:
    return ToolCall(name="", arguments=None, id=f"call_{index}", error=error)
