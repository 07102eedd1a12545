"""The round trip: what a chat template makes of tools, tried before a run starts.

One conversation for each tool: it is announced, the model calls it, the result arrives, the model answers, the user
goes on. How the model is to write a call is what the template writes for one, so the notation that reads this back is
the one to read turns with. What does not survive is a ``Problem``, which says by its name what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from asyncrl.errors import ConfigError
from asyncrl.rollout.chattemplate import ChatTemplate, example_call, result_of
from asyncrl.rollout.env import EnvFactory
from asyncrl.rollout.toolcalls import ParsedTurn, are_calls
from asyncrl.rollout.tools import Tool, example_arguments
from asyncrl.types import Message

__all__ = ["UNANNOUNCED", "Problem", "round_trip"]

Read: TypeAlias = Callable[[str, Sequence[Tool]], ParsedTurn]
"""How a turn's text is read, by somebody who knows these tools."""
UNANNOUNCED = (
    "set rollout.announce_tools to 'text' (a system message of ours describes them) or to 'none' (messages of the "
    "environment do, or the model has to find out by itself)"
)
"""What to do about tools that nobody tells the model of."""
_RESULT, _ANSWER, _QUESTION = "qresultq", "qanswerq", "qquestionq"
# Words that no template writes by itself.
_ASK: Message = {"role": "user", "content": _QUESTION}
_OTHERWISE = "; rollout.announce_tools = 'text' describes tools and calls in a system message of ours"
_SHOWN = 200
# Characters of a text in a message.


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

    def refused(self, factory: EnvFactory) -> bool:
        """True if no run may start with it; an environment that answers turns by itself may need no results."""
        return self.fatal and not (self.name == "results_not_written" and factory.answers)


def round_trip(template: ChatTemplate, tools: Sequence[Tool], read: Read) -> list[Problem]:
    """What of ``tools`` does not survive in ``template``: one problem for each name, with all of its tools."""
    found: dict[str, Problem] = {}
    for problem in _problems(template, tools, read):
        known = found.get(problem.name, problem)
        names = tuple(dict.fromkeys((*known.tools, *problem.tools)))
        found[problem.name] = replace(known, tools=names, fatal=known.fatal or problem.fatal)
    return list(found.values())


def _problems(template: ChatTemplate, tools: Sequence[Tool], read: Read) -> Iterator[Problem]:
    if tools and template.announce_tools != "none":
        yield from _announced(template, tools)
    for tool in tools:
        yield from _called(template, tool, tools, read)
        yield from _answered(template, tool, tools)


def _announced(template: ChatTemplate, tools: Sequence[Tool]) -> Iterator[Problem]:
    name = "tools_not_announced"
    try:
        text = template.prompt([_ASK], tools)
    except ConfigError as error:
        yield Problem(name=name, tools=tuple(tool.name for tool in tools), reason=str(error), fatal=True)
        return
    missing = tuple(tool.name for tool in tools if tool.name not in text)
    if missing:
        reason = f"the chat template does not tell the model of them: {UNANNOUNCED}"
        yield Problem(name=name, tools=missing, reason=reason, fatal=True)


def _called(template: ChatTemplate, tool: Tool, tools: Sequence[Tool], read: Read) -> Iterator[Problem]:
    unwritten = Problem(
        name="calls_not_written",
        tools=(tool.name,),
        reason=f"the chat template writes no calls, so how the model is to write them is not known{_OTHERWISE}",
        fatal=False,
    )
    try:
        text = template.calls(example_call(tool), tools)
    except ConfigError as error:
        yield replace(unwritten, reason=str(error))
        return
    if tool.name not in text:
        if template.announce_tools != "none":  # else that is the environment's business
            yield unwritten
        return
    closing = "</think>" if template.thinks and "</think>" not in text else ""
    found = read(closing + text, tools).tool_calls
    if not are_calls(found, tool.name, example_arguments(tool)):
        why = next((f": {call.error}" for call in found if call.error), "")
        reason = f"a call, which the chat template writes as {text[:_SHOWN]!r}, is not read back{why}{_OTHERWISE}"
        yield Problem(name="calls_not_read", tools=(tool.name,), reason=reason, fatal=not found or not found[0].name)


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
