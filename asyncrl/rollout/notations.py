"""Notations of tool calls: how the families of models write a call, and how it is read back.

Each is a pattern that finds a call in a text, and a function that reads the match. Which of them a model uses shows in
what its chat template writes for a call. A reader gives the calls, none if the match is no call at all, or
raises ``UnreadableCall`` with the reason, which the model is told. A pattern may have the groups ``name`` (the tool's),
``body``, and ``end``, which is empty if the call is not closed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncrl.rollout.callvalues import Parameters, UnreadableCall, checked_call, pairs_of, python_call, read_json
from asyncrl.types import ToolCall

__all__ = ["NOTATIONS", "TAGS", "Notation"]

_DECODER = json.JSONDecoder()
Reader: TypeAlias = Callable[[re.Match[str], Parameters], Sequence[ToolCall]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """How a family of models writes calls."""

    name: str
    marker: str
    """A token that only models have which write calls so."""
    find: Callable[[str], Iterable[re.Match[str]]]
    """Where a text calls something."""
    reader: Reader
    """Reads a match of a call that is closed."""
    content: Callable[[str], str] = str
    """What of the rest is said to the user; all, by default."""

    def read(self, match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
        """The calls in a match. Raises ``UnreadableCall``."""
        groups = match.re.groupindex
        if "end" in groups and not match["end"]:
            raise UnreadableCall("it is not closed", _tool_name(match["name"]) if "name" in groups else "")
        return self.reader(match, parameters)


def _tool_name(written: str) -> str:
    """The name without what some families write around it, as in ``functions.search:0``."""
    return re.sub(r"^functions\.|:\d+$", "", written.strip())


def _pattern(pattern: str) -> Callable[[str], Iterable[re.Match[str]]]:
    return re.compile(pattern, re.DOTALL).finditer


def _between(start: str, end: str, name: str, reader: Reader) -> Notation:
    """The notation of calls that stand between two tokens."""
    find = _pattern(re.escape(start) + r"(?P<body>.*?)(?P<end>" + re.escape(end) + r"|\Z)")
    return Notation(name=name, marker=start, find=find, reader=reader)


def _listed(found: object) -> list[ToolCall]:
    """Calls given as JSON, alone or in a list."""
    return [checked_call(call) for call in found] if isinstance(found, list) else [checked_call(found)]


# <tool_call> .. </tool_call>

_XML = re.compile(r"\s*<function=([^>]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_XML_PAIR = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_KEYED = re.compile(r"\s*([\w.-]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
_KEYED_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_tags(match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
    body = match["body"]
    if xml := _XML.fullmatch(body):
        return [pairs_of(xml[1].strip(), _XML_PAIR.findall(xml[2]), parameters)]
    if keyed := _KEYED.fullmatch(body):
        return [pairs_of(keyed[1], _KEYED_PAIR.findall(keyed[2]), parameters)]
    return _listed(read_json(body) or None)  # an empty list is not what belongs between these tags


_TAGGED = re.compile(r"<tool_call>(?P<body>.*?)(?P<end></tool_call>|\Z)", re.DOTALL)
_WHOLE = re.compile(r"<tool_call>(?P<body>.*)(?P<end></tool_call>)", re.DOTALL)
_JSON_START = re.compile(r"\s*(?=\{)")
_CLOSE = re.compile(r"\s*</tool_call>")
_XML_CLOSE = re.compile(r"</function>\s*</tool_call>")


def _find_tags(text: str) -> Iterator[re.Match[str]]:
    place = 0
    while match := _TAGGED.search(text, place):
        end = _end_of_tags(text, match.start("body"))
        if end is not None and end > match.end():
            match = _WHOLE.fullmatch(text, match.start(), end) or match
        yield match
        place = max(match.end(), place + 1)


def _end_of_tags(text: str, start: int) -> int | None:
    """Where a call ends whose values may hold the closing tag; None if that cannot be told."""
    if opening := _JSON_START.match(text, start):
        try:
            _, end = _DECODER.raw_decode(text, opening.end())
        except (ValueError, RecursionError):
            return None
        close = _CLOSE.match(text, end)
    elif text.startswith("<function=", start + len(text[start : start + 8]) - len(text[start : start + 8].lstrip())):
        close = _XML_CLOSE.search(text, start)
        if close is not None and re.search(r"<tool_call>\s*<function=", text[start : close.start()]):
            return None
    else:
        return None
    return None if close is None else close.end()


TAGS = Notation(name="tags", marker="<tool_call>", find=_find_tags, reader=_read_tags)
"""Between ``<tool_call>`` tags."""


# [name(key="value"), ..]


def _read_python(match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
    body = re.sub(r"""\\(?![\\'"abfnrtvxuUN0-7\n])""", r"\\\\", match["body"].strip())
    if not body.startswith("["):
        body = "[" + ",".join(line for line in body.splitlines() if line.strip()) + "]"
    try:
        tree = ast.parse(body, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [python_call(call) for call in calls]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, UnreadableCall):
            raise
        raise UnreadableCall(f"it is not a list of calls such as [name(key='value')]: {error}") from error


# JSON, alone or in a list


def _read_json(match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
    return _listed(read_json(match["body"]))


def _read_bare_json(match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
    """The whole answer is one object or several; one without a tool's name is an answer that happens to be JSON."""
    body, tagged = match["body"].strip(), bool(match["tag"])
    calls: list[ToolCall] = []
    place = 0
    while place < len(body):
        try:
            found, place = _DECODER.raw_decode(body, place)
            body.encode()
        except (ValueError, RecursionError) as error:
            if tagged or '"name"' in body[:64]:
                raise UnreadableCall(f"it is not JSON: {error}") from error
            return []
        if not tagged and not (isinstance(found, dict) and "name" in found and len(found) <= 3):
            return []
        calls.append(checked_call(found))
        place += len(body[place:]) - len(body[place:].lstrip(" \n;,"))
    return calls


# [TOOL_CALLS]


def _read_bracketed(match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
    body = match["body"].strip()
    if body.startswith("["):
        return _listed(read_json(body))
    head, mark, arguments = body.partition("[ARGS]" if "[ARGS]" in body else "{")
    name, _, id = (part.strip() for part in head.partition("[CALL_ID]"))
    arguments = mark.removeprefix("[ARGS]") + arguments
    return [checked_call({"name": name, "arguments": read_json(arguments or "{}", name), "id": id})]


# tokens around name and arguments


def _read_named(match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
    name = _tool_name(match["name"])
    id = match["name"].strip() if ":" in match["name"] else ""
    body = match["body"].strip().removeprefix("```json").removesuffix("```")
    return [checked_call({"name": name, "arguments": read_json(body or "{}", name), "id": id})]


_QUOTE = '<|"|>'
_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_PLAIN = re.compile(r"\b(?:True|False|None)\b(?!\")")


def _read_quoted(match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
    """``call:name{key:<|"|>text<|"|>,other:1}``"""
    name, pieces = match["name"].strip(), match["body"].split(_QUOTE)
    text = "".join(
        json.dumps(piece) if index % 2 else _PLAIN.sub(lambda word: _WORDS[word[0]], _KEY.sub(r'\1"\2":', piece))
        for index, piece in enumerate(pieces)
    )
    return [checked_call({"name": name, "arguments": read_json(text, name)})]


_INVOKE = re.compile(r'<(?:\w+:)?invoke name="([^"]+)">(.*?)</(?:\w+:)?invoke>', re.DOTALL)
_INVOKE_PAIR = re.compile(r'<(?:\w+:)?parameter name="([^"]+)"[^>]*>(.*?)</(?:\w+:)?parameter>', re.DOTALL)


def _read_invoked(match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
    calls = [pairs_of(name, _INVOKE_PAIR.findall(body), parameters) for name, body in _INVOKE.findall(match["body"])]
    if not calls:
        raise UnreadableCall('it has no <invoke name="..">')
    return calls


_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def _read_channel(match: re.Match[str], parameters: Parameters) -> Sequence[ToolCall]:
    recipient = _RECIPIENT.search(match["head"])
    if recipient is None:
        return []
    return [checked_call({"name": recipient[1], "arguments": read_json(match["body"] or "{}", recipient[1])})]


def _final(text: str) -> str:
    """What the channels say to the user; the text as it is if it has none."""
    messages = list(_find_messages(text))
    if not messages:
        return text
    said = [match["body"] for match in messages if (_CHANNEL.search(match["head"]) or [""])[0].endswith("final")]
    return "".join(said)


_MESSAGE = re.compile(r"(?P<head>.*?)<\|message\|>(?P<body>.*?)(?:<\|(?:end|call|return)\|>|\Z)", re.DOTALL)


def _find_messages(text: str) -> Iterator[re.Match[str]]:
    place = 0
    while text.find("<|message|>", place) >= 0 and (match := _MESSAGE.match(text, place)):
        yield match
        place = match.end()


NOTATIONS: tuple[Notation, ...] = (
    TAGS,
    _between("<|tool_call_start|>", "<|tool_call_end|>", "pythonic", _read_python),
    _between("<function_calls>", "</function_calls>", "python lines", _read_python),
    Notation(
        name="brackets",
        marker="[TOOL_CALLS]",
        find=_pattern(r"\[TOOL_CALLS\](?P<body>.*?)(?=\[TOOL_CALLS\]|\Z)"),
        reader=_read_bracketed,
    ),
    Notation(
        name="call tokens",
        marker="<｜tool▁calls▁begin｜>",
        find=_pattern(
            r"(?:<[|｜]tool[_▁ ]calls(?:[_▁ ]section)?[_▁ ]begin[|｜]>\s*)?<[|｜]tool[_▁ ]call[_▁ ]begin[|｜]>\s*"
            r"(?:function<｜tool[▁ ]sep｜>)?(?P<name>[^<\n]*)(?:<｜tool[▁ ]sep｜>|<\|tool_call_argument_begin\|>|\n|)"
            r"(?P<body>.*?)(?:(?P<end><[|｜]tool[_▁ ]call[_▁ ]end[|｜]>)|\Z)\s*"
            r"(?:<[|｜]tool[_▁ ]calls(?:[_▁ ]section)?[_▁ ]end[|｜]>)?"
        ),
        reader=_read_named,
    ),
    Notation(
        name="quote tokens",
        marker="<|tool_call>",
        find=_pattern(r"<\|tool_call>\s*call:(?P<name>[^{<]+)(?P<body>\{.*?)(?P<end><tool_call\|>|\Z)"),
        reader=_read_quoted,
    ),
    Notation(
        name="invoke",
        marker="<minimax:tool_call>",
        find=_pattern(r"<(?P<tag>\w+:(?:tool_call|function_calls))>(?P<body>.*?)(?:(?P<end></(?P=tag)>)|\Z)"),
        reader=_read_invoked,
    ),
    Notation(name="channels", marker="<|channel|>", find=_find_messages, reader=_read_channel, content=_final),
    _between("<|START_ACTION|>", "<|END_ACTION|>", "action", _read_json),
    _between("<|tool_call|>", "<|/tool_call|>", "json tokens", _read_json),
    Notation(
        name="bare JSON",
        marker="<|python_tag|>",
        find=_pattern(r"\A\s*(?P<tag><\|python_tag\|>)?\s*(?P<body>\{.*)\Z"),
        reader=_read_bare_json,
    ),
)
"""Tried in this order on what a template writes."""
