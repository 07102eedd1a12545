"""The border to user code: what an environment gives is checked and made plain where it comes in. Pure functions.

Rows, messages, answers, tool results, rewards, metrics and snapshots each have one function here. It returns the plain
value, or raises ``InvalidValue`` with the value found, what it must be, and the function that gave it with its file and
line. The member of which it is the value fails; the run goes on. Rows are looked at before anything starts, so what is
wrong with them is a ``ConfigError``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Never

import orjson

from asyncrl.errors import ConfigError, InvalidValue, require_count
from asyncrl.plain import are_plain, jsonable, metric, number, numbers, shown, text, uncopyable_parts
from asyncrl.rollout.usercode import UserTraceback
from asyncrl.types import Message, Row, Trajectory

__all__ = [
    "ROLES",
    "TurnResult",
    "checked_messages",
    "checked_metrics",
    "checked_result",
    "checked_reward",
    "checked_rows",
    "checked_state",
    "checked_turn",
    "place",
    "shared_parts",
]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "environment", "observation", "ipython")
"""Who may say something. Which of them a model knows is its chat template's business."""
LARGEST_REWARD = 1e12
# Its square, summed over a step's tokens, still fits into float32.
_TABLES: Mapping[str, Callable[[Any], Any]] = {
    # What is missing is NaN in pandas, also among texts.
    "iterrows": lambda frame: frame.astype(object).where(frame.notna(), None).to_dict("records"),
    "iter_rows": lambda frame: frame.to_dicts(),
    "to_pylist": lambda table: table.to_pylist(),
}
# By what only they have: pandas, polars, pyarrow. Iterating over such a table gives its columns.
_MESSAGES = "a list of messages such as {'role': 'user', 'content': '..'}"


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The environment's answer to a turn: new messages, and for once a bound on the next turn's tokens."""

    messages: Sequence[Message]
    max_turn_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_turn_tokens is not None:
            require_count("TurnResult.max_turn_tokens", self.max_turn_tokens, least=1)


def place(function: Any) -> str:
    """The function's name, file and line: ``Sums.reward (sums.py:12)``."""
    found = getattr(function, "function", function)  # a tool's
    while True:
        inner = found.func if isinstance(found, partial) else getattr(found, "__func__", None)
        inner = inner or getattr(found, "__wrapped__", None)
        if inner is None:
            break
        found = inner
    name = getattr(found, "__qualname__", type(found).__name__)
    code = getattr(found, "__code__", None)
    if code is None:
        return name
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


def refuse(what: str, value: object, allowed: str, function: Any) -> Never:
    """Raise ``InvalidValue``: ``function`` gave ``value`` as ``what``, which must be ``allowed``."""
    name, colon, line = place(function).partition(" (")
    cause = UserTraceback(f"{line.removesuffix(')')} in {name}", "") if colon else None
    raise InvalidValue(f"{what} is {shown(value)}, but must be {allowed}: {place(function)}") from cause


def checked_messages(value: object, function: Any, *, least: int = 0) -> list[Message]:
    """Messages as new plain dicts, each with a role that is known and a content."""
    if type(value) is not list and not isinstance(value, list | tuple):
        refuse("the answer", value, _MESSAGES, function)
    if len(value) < least:
        refuse("the answer", value, f"{_MESSAGES}, at least {least} of them", function)
    messages: list[Message] = []
    for message in value:
        messages.append(message.copy() if _is_usual(message) else _message(message, len(messages), function))
    return messages


def _is_usual(value: object) -> bool:
    """True for a role, a content and whatever else, all text with nothing to mend, as most messages are."""
    if type(value) is not dict:
        return False
    for key, item in value.items():
        if type(item) is not str or not item.isascii() or type(key) is not str or not key.isascii():
            return False
    return "content" in value and value.get("role") in ROLES


def _message(value: object, index: int, function: Any) -> Message:
    if not isinstance(value, Mapping):
        refuse(f"message {index}", value, "a dict with role and content", function)
    message: Message = {}
    for key, item in value.items():
        if not isinstance(key, str):
            refuse(f"a key of message {index}", key, "text", function)
        message[text(key)] = jsonable(item, partial(_not_json, index, key, function))
    role = message.get("role")
    if role not in ROLES:
        refuse(f"the role of message {index}", role, f"one of {', '.join(ROLES)}", function)
    content = message.get("content")
    if isinstance(content, str) or (isinstance(content, list) and content and all(map(_is_part, content))):
        return message
    if content is None and message.get("tool_calls"):
        return message | {"content": ""}
    if "content" not in message:
        refuse(f"message {index}", value, "a dict with role and content", function)
    parts = ", or parts like {'type': 'text', 'text': '..'}" if isinstance(content, list) else ""
    refuse(f"the content of message {index}", content, f"text{parts}", function)


def _is_part(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _not_json(index: int, key: str, function: Any, path: str, value: object) -> Never:
    refuse(f"message {index}[{shown(key)}]{path}", value, "what JSON has", function)


def checked_turn(value: object, function: Any) -> tuple[list[Message], int | None] | None:
    """The answer to a turn: messages, and for once a bound on the next turn's tokens; None ends the conversation."""
    if value is None:
        return None
    if isinstance(value, TurnResult):
        return checked_messages(value.messages, function), value.max_turn_tokens
    return checked_messages(value, function), None


def checked_result(value: object, function: Any) -> str:
    """The text that a tool gave."""
    if not isinstance(value, str):
        refuse(f"what tool {function.name!r} returned", value, "text", function)
    return text(value)


def checked_reward(value: object, function: Any) -> float:
    """A finite float that training can square."""
    if type(value) is float and -LARGEST_REWARD <= value <= LARGEST_REWARD:
        return value
    try:
        reward = number(value)
    except TypeError:
        refuse("the reward", value, "a number", function)
    if not math.isfinite(reward):
        refuse("the reward", value, "a finite number", function)
    if abs(reward) > LARGEST_REWARD:
        refuse("the reward", value, f"a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}", function)
    return reward


def checked_metrics(traj: Trajectory, function: Any) -> None:
    """Make the metrics of ``traj`` plain: names of text, values that are floats, NaN instead of infinities.

    One that is no number is taken out, and refused: it came in with ``function``, after which this is called.
    """
    found: object = traj.metrics
    if type(found) is dict and (not found or are_plain(found)):
        return
    traj.metrics = numbers(found)
    if not isinstance(found, dict):
        refuse("what it made of traj.metrics", found, "a dict of numbers", function)
    for key, value in found.items():
        if not isinstance(key, str):
            refuse("the name of a metric", key, "text", function)
        try:
            metric(value)
        except TypeError:
            refuse(f"metric {shown(key)}", value, "a number", function)


def checked_state(value: object, function: Any) -> bytes:
    """A snapshot as JSON, from which the same value can be read."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        plain = jsonable(value, partial(_no_state, function))
        return json.dumps(plain, separators=(",", ":")).encode()


def _no_state(function: Any, path: str, value: object) -> Never:
    allowed = "text, because JSON has no other keys" if path.endswith("[key]") else "what JSON has"
    refuse(f"its state{path.removesuffix('[key]')}", value, allowed, function)


def checked_rows(rows: object, key: str = "rows") -> list[Row]:
    """The rows of a dataset, of which there is at least one. Raises ``ConfigError`` for what is none.

    A data frame or table of pandas, polars or pyarrow has a dict for each of its rows.
    """
    if not isinstance(rows, list | tuple):
        _refuse_containers(rows, key)
    sized: Any = rows
    try:
        sized = next((read(sized) for method, read in _TABLES.items() if hasattr(sized, method)), sized)
        found = list(sized) if hasattr(sized, "__iter__") else [sized[index] for index in range(len(sized))]
    except Exception as error:
        raise ConfigError(f"{key} is {shown(rows)}, which cannot be read: {type(error).__name__}: {error}") from error
    if not found:
        raise ConfigError.for_value(key, rows, "a sequence with at least one row")
    if len(found) != len(sized):
        raise ConfigError(f"{key} is {shown(rows)}, which gives {len(found)} rows, but says that it has {len(sized)}")
    return found


def shared_parts(row: Row) -> list[tuple[str, str]]:
    """A warning, its name and its reason, if parts of ``row`` cannot be copied for each member of a group."""
    parts = uncopyable_parts(row)
    reason = f"each member of a group has its own copy of the row, but these cannot be copied: {', '.join(parts)}"
    return [("row_is_shared", reason)] if parts else []


def _refuse_containers(rows: object, key: str) -> None:
    """Refuse what has other things in it than rows, with what to write instead."""
    if isinstance(rows, str | bytes | os.PathLike):
        instead = "the rows themselves, not a name: read the file first, by rl.load_rows(..)"
    elif isinstance(rows, Mapping):
        names = ", ".join(shown(name) for name in list(rows)[:5])
        instead = f"a list of rows: this has the keys {names}; give one of them, if they are splits"
    elif not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        instead = "a sequence, which has a length and an order: write list(..)"
    else:
        return
    raise ConfigError(f"{key} is {shown(rows)}, but must be {instead}")
