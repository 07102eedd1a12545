"""The values in a call that a model wrote: JSON, Python literals, and text of which only a schema says what it is.

What cannot be read raises ``UnreadableCall`` with the reason. The limits are those of JSON: no NaN, no lone surrogates,
integers of any size.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, TypeAlias

import orjson

from asyncrl.types import Message, ToolCall

__all__ = [
    "Parameters",
    "UnreadableCall",
    "call_message",
    "checked_call",
    "pairs_of",
    "python_call",
    "read_json",
]

Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Tool -> JSON schema of its arguments."""
_LONG_INTEGER = re.compile(rb"\d{19}")
_NAMES: Mapping[str, object] = {"true": True, "false": False, "null": None, "none": None}
_TYPES: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    NoneType: frozenset({"null"}),
}


class UnreadableCall(ValueError):
    """A call that cannot be read; ``name`` is the tool's, if so much could be read."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name

    @property
    def call(self) -> ToolCall:
        """The call as the environment gets it: without arguments, and with the reason."""
        return ToolCall(name=self.name, arguments=None, error=str(self))


def call_message(name: str, arguments: Any, id: object = "call00000") -> Message:
    """A call as messages have it, in the form that chat templates know."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def checked_call(call: object) -> ToolCall:
    """A call given as an object with a name and arguments. Raises ``UnreadableCall``."""
    if not isinstance(call, Mapping):
        raise UnreadableCall("it is not an object with a name")
    name = call.get("name", call.get("tool_name"))
    if not isinstance(name, str):
        raise UnreadableCall("it is not an object with a name")
    # Without them: no arguments, as for a tool without parameters; the tool itself knows which it misses.
    arguments: Any = next((call[key] for key in ("arguments", "parameters") if call.get(key) is not None), {})
    if isinstance(arguments, str):
        arguments = read_json(arguments, name)
    if not isinstance(arguments, dict):
        raise UnreadableCall("its arguments are not an object", name)
    id = call.get("id", call.get("tool_call_id"))
    return ToolCall(name=name, arguments=arguments, id=id if isinstance(id, str) else "")


def read_json(text: str, name: str = "") -> Any:
    """The value of a JSON text; ``name`` is the tool's, as far as it is known. Raises ``UnreadableCall``."""
    try:
        encoded = text.encode()
        if _LONG_INTEGER.search(encoded):
            # orjson makes a float of an integer over 64 bits. It still says whether this is JSON at all.
            orjson.loads(encoded)
            return json.loads(encoded)
        return orjson.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise UnreadableCall(f"it is not JSON: {error}", name) from error


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that ``text`` stands for in a notation without types: what ``schema`` asks for, or else the text."""
    wanted = _types(schema)
    if wanted == {"string"}:
        return text
    stripped = text.strip()
    if stripped.lower() in _NAMES:
        value: Any = _NAMES[stripped.lower()]
    else:
        try:
            value = read_json(stripped)
        except UnreadableCall:
            return text
    fits = not wanted or not wanted & {"string"} or bool(_TYPES[type(value)] & wanted)
    return value if fits else text


def _types(schema: Mapping[str, Any]) -> set[str]:
    kinds = {schema["type"]} if isinstance(schema.get("type"), str) else set()
    for choice in schema.get("anyOf", ()):
        kinds |= _types(choice)
    for value in schema.get("enum", [schema["const"]] if "const" in schema else []):
        kinds |= _TYPES.get(type(value), frozenset())
    return kinds


def pairs_of(name: str, pairs: Sequence[tuple[str, str]], parameters: Parameters) -> ToolCall:
    """A call given as parameters and texts; the tool's schema says which of the texts are numbers and other values."""
    known = parameters.get(name, {}).get("properties", {})
    return ToolCall(name=name, arguments={key: _typed(value, known.get(key, {})) for key, value in pairs})


def python_call(call: ast.expr) -> ToolCall:
    """A call as Python writes it, with arguments by name. Raises ``UnreadableCall``, ``ValueError``."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
        raise UnreadableCall("it is not a list of calls such as [name(key='value')]")
    name = ast.unparse(call.func)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise UnreadableCall("its arguments are not all given by name", name)
    return ToolCall(name=name, arguments={str(keyword.arg): _python_value(keyword.value) for keyword in call.keywords})


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id.lower() in _NAMES:
        return _NAMES[node.id.lower()]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key is not None else None for key in node.keys]
        return {str(key): _python_value(value) for key, value in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise UnreadableCall(f"{ast.unparse(node)} is no JSON value")
    return value
