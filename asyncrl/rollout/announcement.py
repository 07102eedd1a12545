"""Telling a model of its tools in plain text: for models whose chat template has no place for them.

``Announcement`` says who tells the model. The text has each tool as JSON, and how a call is written. Pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from asyncrl.types import Message

__all__ = ["AnnounceTools", "announced", "tagged", "with_announcement"]

AnnounceTools: TypeAlias = Literal["template", "text", "none"]
"""Who tells the model of its tools: the chat template, a system message of ours, or nobody but the environment."""


def announced(schemas: Sequence[Mapping[str, Any]], example: str) -> str:
    """What a model reads of its tools, and of how it calls one: as in ``example``."""
    tools = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        "You can call these tools. Each line describes one as JSON, with its name and its parameters:\n"
        f"{tools}\n\n"
        "To call a tool, write its name and its arguments like this, and then end your message:\n"
        f"{example.strip()}\n\n"
        "You will then be given the result."
    )


def with_announcement(messages: Sequence[Message], text: str, *, system: bool) -> list[Message]:
    """``messages`` with ``text`` in the system message, which is added if there is none.

    Without ``system``, for templates that know no such message, it stands in front of what the user says first.
    """
    first = messages[0] if messages else {}
    if system and first.get("role") in ("system", "developer"):
        return [first | {"content": f"{first.get('content') or ''}\n\n{text}"}, *messages[1:]]
    if system:
        return [{"role": "system", "content": text}, *messages]
    users = (index for index, message in enumerate(messages) if message.get("role") == "user")
    place = next(users, None)
    if place is None:
        return [{"role": "user", "content": text}, *messages]
    asked = messages[place]
    return [*messages[:place], asked | {"content": f"{text}\n\n{asked.get('content') or ''}"}, *messages[place + 1 :]]


def tagged(turn: Message) -> str:
    """The calls of ``turn`` as JSON between tags: how calls are read if a template has no way of its own."""
    calls = [call["function"] for call in turn["tool_calls"]]
    return "".join(f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls)
