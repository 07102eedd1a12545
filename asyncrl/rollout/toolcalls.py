"""Reading a model's message: its text, and the tool calls in it.

Reasoning is told from the answer first: a call inside of reasoning is a thought, and what stands in an answer or in a
call's arguments ends no reasoning. Then the calls are read, in one of the notations of ``notations`` or as the
tokenizer's own response template describes them. A call that cannot be read is kept as a ``ToolCall`` without
arguments and with the reason, so that the environment can say so to the model; nothing here raises because of what a
model wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.rollout.callvalues import UnreadableCall, call_message, checked_call
from asyncrl.rollout.notations import TAGS, Notation
from asyncrl.types import Message, ToolCall

__all__ = ["ParsedTurn", "are_calls", "parse_calls", "parse_hermes", "parse_with_template"]

_THINK, _END_THINK = "<think>", "</think>"


@dataclass(slots=True, kw_only=True)
class ParsedTurn:
    """One model message: a view of the sampled tokens. Not to be changed, but quick to make."""

    message: Message
    """Role, content and, if any call could be read, ``tool_calls`` in the form that chat templates know."""
    tool_calls: tuple[ToolCall, ...]
    """In the order in which they were written, unreadable ones included."""


def parse_hermes(text: str, *, thinking: bool = False) -> ParsedTurn:
    """Read calls between ``<tool_call>`` tags: as JSON (Hermes, Qwen3), XML (Qwen3.5, Nemotron) or pairs (GLM).

    Example::

        parse_hermes('Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        # content "Hm.", one ToolCall(name="add", arguments={"a": 1}, id="call00000")
    """
    return parse_calls(text, TAGS, thinking=thinking)


def parse_calls(
    text: str, notation: Notation, *, tools: Sequence[Mapping[str, Any]] = (), thinking: bool = False
) -> ParsedTurn:
    """Read calls in ``notation``. Reasoning stays in the content, as do calls that cannot be read.

    ``thinking``: the prompt has opened reasoning. ``tools`` are schemas, by which notations without types tell a number
    from a string.
    """
    reasoning, answer = _split_reasoning(text, notation, thinking=thinking)
    if answer is None:
        return _turn({"content": text}, ())
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls: list[ToolCall] = []
    kept: list[str] = []
    place = 0
    for match in notation.find(answer):
        found, readable = _read(match, notation, parameters)
        if not found:
            continue
        calls.extend(_numbered(call, len(calls) + index) for index, call in enumerate(found))
        kept.append(answer[place : match.start()])
        place = match.end()
        if not readable:
            kept.append(match.group())
    rest = "".join([*kept, answer[place:]])
    content = reasoning + notation.content(rest)
    return _turn({"content": content.strip() if calls else content}, calls)


def are_calls(calls: Sequence[ToolCall], name: str, arguments: object) -> bool:
    """True if this call was read and no other."""
    return [(call.name, call.arguments) for call in calls] == [(name, arguments)]


def parse_with_template(tokenizer: Any, text: str, *, prefix: str, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
    """Read ``text`` with the tokenizer's ``response_template``, which may put reasoning under a key of its own.

    ``prefix`` is the end of the prompt: a template may have written the message's first tokens. ``tools`` are their
    schemas, by which notations without types tell a number from a string.
    """
    try:
        message: Message = tokenizer.parse_response(text, prefix=prefix, tools=list(tools) or None)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return _turn({"content": text}, [_numbered(UnreadableCall(str(error)).call, 0)])
    calls = []
    for index, call in enumerate(message.pop("tool_calls", None) or []):
        try:
            found = checked_call(call.get("function") if isinstance(call, Mapping) else call)
        except UnreadableCall as error:
            found = error.call
        calls.append(_numbered(found, index))
    return _turn(message | {"content": message.get("content") or ""}, calls)


def _split_reasoning(text: str, notation: Notation, *, thinking: bool) -> tuple[str, str | None]:
    """Reasoning with its end tag, and the answer; None if it never stopped thinking.

    Only what stands in front is reasoning. Some models are given their opening tag by a prompt that is not known here,
    so that an end tag without one ends reasoning too, unless it stands inside of a call.
    """
    if thinking or text.lstrip().startswith(_THINK):
        before, end, answer = text.partition(_END_THINK)
        return (before + end, answer) if end else (text, None)
    outside = 0
    for match in notation.find(text) if _END_THINK in text else ():
        place = text.find(_END_THINK, outside, match.start())
        if place >= 0:
            break
        outside = match.end()
    else:
        place = text.find(_END_THINK, outside)
    if place < 0 or _THINK in text[:place]:  # the answer mentions both
        return "", text
    return text[: place + len(_END_THINK)], text[place + len(_END_THINK) :]


def _read(match: Any, notation: Notation, parameters: Mapping[str, Any]) -> tuple[Sequence[ToolCall], bool]:
    """What a match of the notation's pattern calls, and whether all of it could be read."""
    try:
        return notation.read(match, parameters), True
    except UnreadableCall as error:
        return [error.call], False


def _numbered(call: ToolCall, index: int) -> ToolCall:
    # Nine letters and digits, as some templates demand.
    return ToolCall(name=call.name, arguments=call.arguments, id=call.id or f"call{index:05}", error=call.error)


def _turn(message: Message, calls: Sequence[ToolCall]) -> ParsedTurn:
    message["role"] = "assistant"
    readable = [call_message(call.name, dict(call.arguments), call.id) for call in calls if call.arguments is not None]
    if readable:
        message["tool_calls"] = readable
    return ParsedTurn(message=message, tool_calls=tuple(calls))
