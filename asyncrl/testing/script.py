"""What a scripted model says: its turns as text and calls, and how a person reads them and their conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.types import Message

__all__ = ["Asked", "Call", "Script", "ScriptEnded", "Turn", "call", "checked_turn", "shown_conversation", "shown_turn"]


class ScriptEnded(AsyncRLError):
    """A script and its conversation did not end together: it has too few turns, or some were not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call in a turn. Made by ``call``."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


def call(name: str, /, **arguments: Any) -> Call:
    """A tool call: ``call("search", query="x")``. Nothing is checked, for models make mistakes too."""
    return Call(name=name, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a script that is a function gets: the conversation in which the model has to say its next turn."""

    messages: Sequence[Message]
    """So far, the model's own included."""
    turn: int
    """How many turns the model has said in it."""
    trajectory: str
    """Its ``id``."""
    member: int
    """Its place in its group."""


Turn: TypeAlias = str | Call | Sequence[str | Call]
Script: TypeAlias = Sequence[Turn] | Callable[[Asked], Turn | None]


def checked_turn(turn: object, place: int) -> tuple[str | Call, ...]:
    """The parts of a turn. Raises ``ConfigError`` for anything else than text and calls."""
    parts = tuple(turn) if isinstance(turn, list | tuple) else (turn,)
    for part in parts:
        if not isinstance(part, str | Call):
            allowed = "text, call(name, ..), or a list of these"
            raise ConfigError.for_value(f"turn {place + 1} of the script", part, allowed)
    return parts


def shown_turn(parts: Sequence[str | Call]) -> str:
    """A turn as it stands in a script."""
    texts = [repr(part) if isinstance(part, str) else f"call {part}" for part in parts]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def shown_conversation(messages: Sequence[Message]) -> str:
    """A conversation as a person reads it: a line for each message, more if its text has more, one for each call."""
    lines: list[str] = []
    for message in messages:
        who, content = str(message.get("role")), message.get("content") or ""
        if who == "tool":
            who = f"tool {message.get('name', '')}"
        calls = [_shown_call(made) for made in message.get("tool_calls") or ()]
        if content or not calls:
            lines.append(f"{who}: {content}")
        lines.extend(f"{who} calls {made}" for made in calls)
    return "\n".join(lines)


def _shown_call(made: Mapping[str, Any]) -> str:
    function = made["function"]
    arguments = function["arguments"]
    return str(Call(name=function["name"], arguments=arguments if isinstance(arguments, Mapping) else {"": arguments}))
