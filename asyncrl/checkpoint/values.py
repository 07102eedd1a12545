"""Trajectories, groups and their parts as JSON, and back. Token data and messages are not in it: see ``tokens.py``.

Every field of ``Trajectory`` is saved, also one that is added later; those that JSON cannot hold as they are have a
line of their own below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import orjson

from asyncrl.errors import EnvironmentFailure
from asyncrl.plain import copied, error_text, jsonable, numbers, shown, text
from asyncrl.types import DropReason, Message, Row, Span, StopReason, ToolCall, Trajectory, TruncationCause

__all__ = ["dumps", "frozen", "loads", "read_trajectory", "trajectory_head"]

Json = dict[str, Any]
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_APART = ("row", "spans", "messages", "error", "env_state")
_NAMES = tuple(field.name for field in fields(Trajectory))
_PLAIN = tuple(name for name in _NAMES if name not in _APART)


def dumps(value: object) -> bytes:
    """``value`` as JSON. What JSON does not have is written as text that describes it: a save must not fail, nor be
    unreadable, because of what an environment does to its messages while it runs.
    """
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        if not isinstance(value, dict):
            return json.dumps(jsonable(value, _described), separators=(",", ":")).encode()
    # Only what is odd takes the long way, and what is JSON already stays.
    parts = {text(str(key)): item for key, item in value.items()}
    return orjson.dumps(
        {
            key: item if isinstance(item, orjson.Fragment) else orjson.Fragment(dumps(item))
            for key, item in parts.items()
        }
    )


def loads(data: bytes) -> Any:
    """What ``dumps`` wrote, integers of any size too."""
    return json.loads(data)


def _described(path: str, value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable({field.name: getattr(value, field.name) for field in fields(value)})
    return shown(value)


def frozen(traj: Trajectory) -> Trajectory:
    """The trajectory as it is now, while its task goes on. Costs its number of spans and messages, not of tokens."""
    values = {name: getattr(traj, name) for name in _NAMES}
    for name, value in values.items():
        if type(value) in (list, dict) and name != "row":
            values[name] = value.copy()
    return Trajectory(**values)


def trajectory_head(traj: Trajectory) -> Json:
    """All of ``traj`` but its row, its messages and its tokens."""
    head: Json = {name: getattr(traj, name) for name in _PLAIN}
    head["metrics"] = numbers(traj.metrics)
    if traj.error is not None:
        head["error"] = error_text(traj.error)
    if traj.env_state is not None:
        head["env_state"] = orjson.Fragment(traj.env_state)
    return head


def read_trajectory(
    head: Mapping[str, Any], row: Row, spans: Sequence[Span], messages: Sequence[Message]
) -> Trajectory:
    """The trajectory whose head, row, spans and messages these are."""
    values = {name: value for name, value in head.items() if name in _NAMES}
    for name, read in _READERS.items():
        if values.get(name) is not None:
            values[name] = read(values[name])
    return Trajectory(**values, row=copied(row), spans=list(spans), messages=list(messages))


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    # JSON has no NaN: what was not finite comes back as one. What is no number at all is left out.
    return numbers({key: math.nan if value is None else value for key, value in values.items()})


_READERS: Mapping[str, Callable[[Any], object]] = {
    "stop": StopReason,
    "truncated": TruncationCause,
    "dropped": DropReason,
    "tool_calls": lambda calls: [ToolCall(**call) for call in calls],
    "metrics": _numbers,
    "seconds": _numbers,
    # Whatever it was, it happened in a process that is gone.
    "error": EnvironmentFailure,
    "env_state": dumps,
}
