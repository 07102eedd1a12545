"""The round trip: what a chat template makes of tools, tried before a run starts.

One conversation for each tool: it is announced, the model calls it, the result arrives, the model answers, the user
goes on. How the model is to write a call is what the template writes for one, so the notation that reads this back is
the one to read turns with. What does not survive is a ``Problem``, which says by its name what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.rollout.chattemplate import ChatTemplate
from asyncrl.rollout.notations import NOTATIONS, Notation
from asyncrl.rollout.toolcalls import ParsedTurn, parse_calls
from asyncrl.rollout.tools import Tool
from asyncrl.types import Message

__all__ = ["Problem", "example_call", "notation_of", "round_trip"]

_RESULT, _ANSWER, _QUESTION = "qresultq", "qanswerq", "qquestionq"
# Words that no template writes by itself.
_SHOWN = 200
# Characters of a text in a message.
_EXAMPLES: Mapping[str, object] = {"string": "b", "integer": 2, "number": 1.5, "boolean": True, "null": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that a template does not carry through."""

    name: str
    """``tools_not_announced``, ``calls_not_written``, ``calls_not_read``, ``results_not_written`` or
    ``conversation_not_continued``."""
    tools: tuple[str, ...]
    reason: str
    fatal: bool
    """True if a run would only show it by a model that never calls a tool, or never sees a result."""


def notation_of(template: ChatTemplate, tokens: Collection[str]) -> Notation | None:
    """The notation in which ``template`` writes calls, or if it writes none the one of which ``tokens`` has the mark.

    None if nothing says so, or if it is a notation that is not known here.
    """
    arguments = {"text": "b c", "count": 2, "exact": True}
    schema = {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "exact": {"type": "boolean"},
                },
            },
        },
    }
    try:
        text = template.calls(_call("look_up", arguments), ())
    except ConfigError:
        text = ""
    if "look_up" not in text:
        return next((notation for notation in NOTATIONS if notation.marker in tokens), None)
    for notation in NOTATIONS:
        found = parse_calls(text, notation, tools=[schema]).tool_calls
        if [(call.name, call.arguments) for call in found] == [("look_up", arguments)]:
            return notation
    return None


def round_trip(
    template: ChatTemplate,
    tools: Sequence[Tool],
    read: Callable[[str, Sequence[Tool]], ParsedTurn],
    *,
    spelled: Callable[[str], bool],
) -> list[Problem]:
    """What of ``tools`` does not survive in ``template``, whose turns are read by ``read(text, tools)``.

    ``spelled(text)`` is False for what the tokenizer has no tokens for: such a model cannot be told.
    """
    problems = [_announced(template, tools, spelled)] if tools else []
    for tool in tools:
        problems += [_called(template, tool, tools, read, spelled=spelled), _answered(template, tool, tools)]
    return _joined([problem for problem in problems if problem is not None])


def _announced(template: ChatTemplate, tools: Sequence[Tool], spelled: Callable[[str], bool]) -> Problem | None:
    try:
        text = template.prompt([{"role": "user", "content": _QUESTION}], tools)
    except ConfigError as error:
        return Problem(name="tools_not_announced", tools=_names(tools), reason=str(error), fatal=True)
    missing = [tool for tool in tools if tool.name not in text and spelled(tool.name)]
    if not missing:
        return None
    reason = "the chat template does not tell the model of them: the environment's own text has to"
    return Problem(name="tools_not_announced", tools=_names(missing), reason=reason, fatal=False)


def _called(
    template: ChatTemplate,
    tool: Tool,
    tools: Sequence[Tool],
    read: Callable[[str, Sequence[Tool]], ParsedTurn],
    *,
    spelled: Callable[[str], bool],
) -> Problem | None:
    arguments = _example(tool.parameters)
    try:
        text = template.calls(_call(tool.name, arguments), tools)
    except ConfigError as error:
        return Problem(name="calls_not_written", tools=(tool.name,), reason=str(error), fatal=False)
    if tool.name not in text:
        if not spelled(tool.name):
            return None
        reason = "the chat template writes no calls, so how the model is to write them is not known"
        return Problem(name="calls_not_written", tools=(tool.name,), reason=reason, fatal=False)
    closing = "</think>" if template.thinks and "</think>" not in text else ""
    found = read(closing + text, tools).tool_calls
    if [(call.name, call.arguments) for call in found] == [(tool.name, arguments)]:
        return None
    reason = next((call.error for call in found if call.error), "")
    reason = f"a call, which the chat template writes as {text[:_SHOWN]!r}, is not read back{reason and ': ' + reason}"
    return Problem(name="calls_not_read", tools=(tool.name,), reason=reason, fatal=not found or not found[0].name)


def _answered(template: ChatTemplate, tool: Tool, tools: Sequence[Tool]) -> Problem | None:
    turn = example_call(tool)
    result: Message = {
        "role": "tool",
        "name": tool.name,
        "tool_call_id": turn["tool_calls"][0]["id"],
        "content": _RESULT,
    }
    try:
        text = template.after(turn, [result], tools)
        if _RESULT not in text or _again(template, turn, tools, text):
            reason = f"the chat template leaves a tool's result out: after a call it writes {text[:_SHOWN]!r}"
            return Problem(name="results_not_written", tools=(tool.name,), reason=reason, fatal=True)
    except ConfigError as error:
        return Problem(name="results_not_written", tools=(tool.name,), reason=str(error), fatal=True)
    answer: Message = {"role": "assistant", "content": _ANSWER}
    question: Message = {"role": "user", "content": _QUESTION}
    try:
        if _QUESTION in (text := template.after(answer, [question], tools)):
            return None
        reason = f"the chat template leaves out what follows an answer: it writes {text[:_SHOWN]!r}"
    except ConfigError as error:
        reason = str(error)
    return Problem(name="conversation_not_continued", tools=(tool.name,), reason=reason, fatal=False)


def _again(template: ChatTemplate, turn: Message, tools: Sequence[Tool], text: str) -> bool:
    """True if ``text``, which is to follow the turn, has its call once more."""
    written = template.calls(turn, tools).strip()
    return bool(written) and written in text


def example_call(tool: Tool) -> Message:
    """A model's turn that calls ``tool`` with arguments that fit its schema."""
    return _call(tool.name, _example(tool.parameters))


def _call(name: str, arguments: Mapping[str, Any]) -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


def _example(schema: Mapping[str, Any]) -> Any:
    """A value that fits a tool's JSON schema."""
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "anyOf" in schema:
        return _example(schema["anyOf"][0])
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: _example(inner) for name, inner in properties.items()}
    if kind == "array":
        return [_example(schema.get("items", {"type": "string"}))]
    return _EXAMPLES.get(str(kind), "b")


def _names(tools: Sequence[Tool]) -> tuple[str, ...]:
    return tuple(tool.name for tool in tools)


def _joined(problems: Sequence[Problem]) -> list[Problem]:
    """One problem for each name, with all of its tools and the first one's reason."""
    joined: dict[str, Problem] = {}
    for problem in problems:
        known = joined.get(problem.name, problem)
        joined[problem.name] = Problem(
            name=problem.name,
            tools=tuple(dict.fromkeys((*known.tools, *problem.tools))),
            reason=known.reason,
            fatal=known.fatal or problem.fatal,
        )
    return list(joined.values())
