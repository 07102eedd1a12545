"""Tools: functions that a model may call, described by their signature.

A ``Tool`` promises that its function only ever sees arguments of the annotated types, that nobody waits for it beyond
its deadline, that it does not hold the event loop if it is a plain function, and that it gives text. Which call is run
when, and what the model reads when one fails, is the environment's business.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from asyncrl.errors import ConfigError
from asyncrl.rollout.border import checked_result
from asyncrl.rollout.calls import Deadline, in_thread

__all__ = ["Tool", "elide", "example_arguments", "tool"]

ToolFunction: TypeAlias = Callable[..., Awaitable[str]] | Callable[..., str]
_TIMEOUT_S = 600.0
_EXAMPLES: Mapping[str, object] = {"string": "b", "integer": 2, "number": 1.5, "boolean": True, "null": None}
_TYPES = "str, int, float, bool, None, Literal, list[T], dict[str, T], a union of these, or Annotated[T, 'description']"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. Made by ``tool``; calling it calls the function as it is."""

    name: str
    description: str
    """The function's docstring."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""
    function: ToolFunction
    timeout: float = _TIMEOUT_S
    """Seconds that one call may take."""
    method: bool = False
    """True while the function still needs the environment as its ``self``."""
    asynchronous: bool = True
    """False for a plain function, which runs in a thread."""
    validator: Any = field(repr=False)
    """pydantic's ``TypeAdapter`` of the arguments object."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def __get__(self, env: object | None, owner: type | None = None) -> Tool:
        """Bind a decorated method to its environment, as for any method."""
        if env is None or not self.method:
            return self
        return replace(self, function=MethodType(self.function, env), method=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as if it were not a tool."""
        return self.function(*args, **kwargs)

    async def run(self, arguments: Mapping[str, Any], env: object | None = None) -> str:
        """Call the function with arguments that a model wrote; a method of ``env`` if it is one.

        Raises ``ValueError`` if they do not fit the schema, ``RolloutTimeout`` at the deadline, ``InvalidValue``
        if the result is not text, and whatever the function raises.
        """
        checked = self._checked(arguments)
        with Deadline(f"tool {self.name!r}", self.timeout):
            call = partial(self.function, env, **checked) if self.method else partial(self.function, **checked)
            outcome: Any = call() if self.asynchronous else in_thread(call, f"tool {self.name!r}")
            result: object = await outcome
        return checked_result(result, self)

    def _checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        from pydantic import ValidationError

        try:
            checked: dict[str, Any] = self.validator.validate_python(arguments)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            reasons = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in found]
            raise ValueError(f"invalid arguments: {'; '.join(reasons)}") from None
        return checked


@overload
def tool(function: ToolFunction, /) -> Tool: ...
@overload
def tool(*, timeout: float = _TIMEOUT_S) -> Callable[[ToolFunction], Tool]: ...
def tool(
    function: ToolFunction | None = None, /, *, timeout: float = _TIMEOUT_S
) -> Tool | Callable[[ToolFunction], Tool]:
    """Make a function, or a method of an ``Env``, a tool; ``timeout`` is in seconds for each call.

    Name, docstring and type hints become what the model is told::

        @rl.tool(timeout=30.0)
        async def search(query: Annotated[str, "what to look for"], limit: int = 10) -> str:
            '''Search the manual.'''

    A plain function runs in a thread, which goes on after its deadline; what computes long, or may never end, is better
    written with ``in_process`` below ``tool``. Raises ``ConfigError`` for a type that JSON does not have, or a default
    of another type.
    """
    if function is None:
        return lambda decorated: _make(decorated, timeout)
    return _make(function, timeout)


def _make(function: ToolFunction, timeout: float) -> Tool:
    name = getattr(function, "__name__", repr(function))
    if not timeout > 0:
        raise ConfigError.for_value(f"timeout of tool {name!r}", timeout, "a positive number of seconds")
    parameters = list(inspect.signature(function).parameters.values())
    method = bool(parameters) and parameters[0].name == "self"
    validator = _validator(name, parameters[1:] if method else parameters, _hints(name, function))
    schema = validator.json_schema()
    schema.pop("title")
    for property_schema in schema["properties"].values():
        property_schema.pop("title", None)
    return Tool(
        name=name,
        description=inspect.getdoc(function) or "",
        parameters=schema,
        function=function,
        timeout=timeout,
        method=method,
        asynchronous=inspect.iscoroutinefunction(function),
        validator=validator,
    )


def _hints(name: str, function: ToolFunction) -> dict[str, Any]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"tool {name!r} has an annotation that is not defined in its module: {error}") from error
    if hints.get("return", str) is not str:
        raise ConfigError.for_value(f"return type of tool {name!r}", hints["return"], "str")
    return hints


def _validator(name: str, parameters: list[inspect.Parameter], hints: Mapping[str, Any]) -> Any:
    """A strict pydantic validator of the arguments object; absent optional arguments stay absent."""
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
    from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

    config = ConfigDict(strict=True, allow_inf_nan=False)
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        key = f"parameter {parameter.name!r} of tool {name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{key} is {parameter.kind.description}, but must be one that is passed by name")
        hint: Any = hints.get(parameter.name)
        if not _supported(hint):
            raise ConfigError.for_value(f"type of {key}", hint, _TYPES)
        description = next((text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)), None)
        if parameter.default is parameter.empty:
            arguments[parameter.name] = Annotated[hint, Field(description=description)]
            continue
        try:
            TypeAdapter(hint, config=config).validate_python(parameter.default)
        except ValidationError as error:
            raise ConfigError.for_value(f"default of {key}", parameter.default, f"of its type, {hint}") from error
        extra = Field(description=description, json_schema_extra={"default": parameter.default})
        arguments[parameter.name] = NotRequired[Annotated[hint, extra]]
    shape: Any = cast(Any, TypedDict)(name, arguments)
    shape.__pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
    return TypeAdapter(shape)


def _supported(hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _supported(inner[0])
    if origin in (Union, UnionType, list):
        return all(_supported(part) for part in inner)
    if origin is dict:
        return inner[0] is str and _supported(inner[1])
    if origin is Literal:
        return all(isinstance(value, str | int | NoneType) for value in inner)
    return hint in (str, int, float, bool, NoneType)


def example_arguments(tool: Tool) -> dict[str, Any]:
    """Made-up arguments that fit the tool's schema, one for each of its parameters."""
    return {name: _example(schema) for name, schema in tool.parameters.get("properties", {}).items()}


def _example(schema: Mapping[str, Any]) -> Any:
    """A value that fits a JSON schema."""
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


def elide(text: str, max_tokens: int, tokenizer: Any) -> str:
    """Leave out the middle of ``text`` so that at most ``max_tokens`` are left, the mark in their place included.

    Empty if not even the mark fits. ``tokenizer`` needs ``encode(text, add_special_tokens=False)``.
    """
    if len(text.encode()) <= max_tokens:  # a token is at least one byte, so nothing has to be counted
        return text
    shortened, kept = text, len(text)
    while (tokens := len(tokenizer.encode(shortened, add_special_tokens=False))) > max_tokens:
        if kept == 0:
            return ""
        # Tokens are not spread evenly, so this may take a few rounds; each keeps less than the one before.
        kept = min(kept - 1, kept * max_tokens // tokens)
        tail = kept // 2
        mark = f"\n[{len(text) - kept} characters left out]\n"
        shortened = text[: kept - tail] + mark + text[len(text) - tail :]
    return shortened
