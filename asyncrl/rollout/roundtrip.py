"""The round trip: what a chat template makes of tools, tried before a run starts.

One conversation for each tool: it is announced, the model calls it, the result arrives, the model answers, the user
goes on. How the model is to write a call is what the template writes for one, so the notation that reads this back is
the one to read turns with. What does not survive is a ``Problem``, which says by its name what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from asyncrl.errors import ConfigError
from asyncrl.rollout.callvalues import call_message
from asyncrl.rollout.chattemplate import ChatTemplate, result_of, turn_of
from asyncrl.rollout.notations import NOTATIONS, Notation
from asyncrl.rollout.toolcalls import ParsedTurn, parse_calls
from asyncrl.rollout.tools import Tool
from asyncrl.types import Message, ToolCall

__all__ = ["Problem", "example_call", "notation_of", "round_trip"]

Read: TypeAlias = Callable[[str, Sequence[Tool]], ParsedTurn]
"""How a turn's text is read, by somebody who knows these tools."""
Spelled: TypeAlias = Callable[[str], bool]
"""False for a text that the tokenizer has no tokens for: a model with it cannot be told."""
_RESULT, _ANSWER, _QUESTION = "qresultq", "qanswerq", "qquestionq"
# Words that no template writes by itself.
_ASK: Message = {"role": "user", "content": _QUESTION}
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
    """The notation in which ``template`` writes calls, or if it writes none the one whose marker is in ``tokens``.

    None if nothing says so, or if it is a notation that is not known here.
    """
    arguments = {"text": "b c", "count": 2, "exact": True}
    kinds = {"text": {"type": "string"}, "count": {"type": "integer"}, "exact": {"type": "boolean"}}
    schema = {"function": {"name": "look_up", "parameters": {"type": "object", "properties": kinds}}}
    try:
        text = template.calls(turn_of([call_message("look_up", arguments)]), ())
    except ConfigError:
        text = ""
    if "look_up" not in text:
        return next((notation for notation in NOTATIONS if notation.marker in tokens), None)
    for notation in NOTATIONS:
        if _are(parse_calls(text, notation, tools=[schema]).tool_calls, "look_up", arguments):
            return notation
    return None


def round_trip(template: ChatTemplate, tools: Sequence[Tool], read: Read, *, spelled: Spelled) -> list[Problem]:
    """What of ``tools`` does not survive in ``template``: one problem for each name, with all of its tools."""
    found: dict[str, Problem] = {}
    for problem in _problems(template, tools, read, spelled):
        known = found.get(problem.name, problem)
        names = tuple(dict.fromkeys((*known.tools, *problem.tools)))
        found[problem.name] = replace(known, tools=names, fatal=known.fatal or problem.fatal)
    return list(found.values())


def _problems(template: ChatTemplate, tools: Sequence[Tool], read: Read, spelled: Spelled) -> Iterator[Problem]:
    if tools:
        yield from _announced(template, tools, spelled)
    for tool in tools:
        yield from _called(template, tool, tools, read, spelled)
        yield from _answered(template, tool, tools)


def _announced(template: ChatTemplate, tools: Sequence[Tool], spelled: Spelled) -> Iterator[Problem]:
    name = "tools_not_announced"
    try:
        text = template.prompt([_ASK], tools)
    except ConfigError as error:
        yield Problem(name=name, tools=tuple(tool.name for tool in tools), reason=str(error), fatal=True)
        return
    missing = tuple(tool.name for tool in tools if tool.name not in text and spelled(tool.name))
    if missing:
        reason = "the chat template does not tell the model of them: the environment's own text has to"
        yield Problem(name=name, tools=missing, reason=reason, fatal=False)


def _called(
    template: ChatTemplate, tool: Tool, tools: Sequence[Tool], read: Read, spelled: Spelled
) -> Iterator[Problem]:
    unwritten = Problem(
        name="calls_not_written",
        tools=(tool.name,),
        reason="the chat template writes no calls, so how the model is to write them is not known",
        fatal=False,
    )
    try:
        text = template.calls(example_call(tool), tools)
    except ConfigError as error:
        yield replace(unwritten, reason=str(error))
        return
    if tool.name not in text:
        if spelled(tool.name):
            yield unwritten
        return
    closing = "</think>" if template.thinks and "</think>" not in text else ""
    found = read(closing + text, tools).tool_calls
    if not _are(found, tool.name, _example(tool.parameters)):
        why = next((f": {call.error}" for call in found if call.error), "")
        reason = f"a call, which the chat template writes as {text[:_SHOWN]!r}, is not read back{why}"
        yield Problem(name="calls_not_read", tools=(tool.name,), reason=reason, fatal=not found or not found[0].name)


def _are(calls: Sequence[ToolCall], name: str, arguments: object) -> bool:
    """True if this call was read and no other."""
    return [(call.name, call.arguments) for call in calls] == [(name, arguments)]


def _answered(template: ChatTemplate, tool: Tool, tools: Sequence[Tool]) -> Iterator[Problem]:
    turn = example_call(tool)
    try:
        text = template.after(turn, [result_of(turn, _RESULT)], tools)
        # What is to follow the turn may have its call once more, instead of the result.
        left_out = _RESULT not in text or ((call := template.calls(turn, tools).strip()) and call in text)
        reason = f"the chat template leaves a tool's result out: after a call it writes {text[:_SHOWN]!r}"
    except ConfigError as error:
        left_out, reason = True, str(error)
    if left_out:
        yield Problem(name="results_not_written", tools=(tool.name,), reason=reason, fatal=True)
        return
    try:
        text = template.after({"role": "assistant", "content": _ANSWER}, [_ASK], tools)
        if _QUESTION in text:
            return
        reason = f"the chat template leaves out what follows an answer: it writes {text[:_SHOWN]!r}"
    except ConfigError as error:
        reason = str(error)
    yield Problem(name="conversation_not_continued", tools=(tool.name,), reason=reason, fatal=False)


def example_call(tool: Tool) -> Message:
    """A model's turn that calls ``tool`` with arguments that fit its schema."""
    return turn_of([call_message(tool.name, _example(tool.parameters))])


def _example(schema: Mapping[str, Any]) -> Any:
    """A value that fits a tool's JSON schema."""
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "anyOf" in schema:
        return _example(schema["anyOf"][0])
    kind = schema.get("type")
    if kind == "object":
        return {name: _example(inner) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [_example(schema.get("items", {"type": "string"}))]
    return _EXAMPLES.get(str(kind), "b")
