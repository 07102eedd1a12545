from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Annotated, Any, Literal

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, EnvironmentFailure, RolloutTimeout
from asyncrl.rollout.tools import Tool, elide, tool
from asyncrl.testing.clock import run_virtual


@tool
async def everything(
    query: Annotated[str, "what to look for"],
    ratio: float,
    flag: bool,
    mode: Literal["fast", "slow"],
    tags: list[str],
    counts: dict[str, int],
    either: int | str | None,
    limit: int | None = 10,
) -> str:
    """Search the manual."""
    return f"{query} {ratio} {limit}"


GOOD: dict[str, Any] = {
    "query": "q",
    "ratio": 1,
    "flag": True,
    "mode": "fast",
    "tags": ["a"],
    "counts": {"b": 1},
    "either": "c",
}


def test_the_signature_becomes_a_schema() -> None:
    """Types, descriptions, defaults and required parameters are told to the model; others are refused."""
    assert everything.name == "everything"
    assert everything.description == "Search the manual."
    assert everything.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "mode": {"type": "string", "enum": ["fast", "slow"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 10},
        },
        "required": ["query", "ratio", "flag", "mode", "tags", "counts", "either"],
        "additionalProperties": False,
    }
    assert everything.schema["function"]["name"] == "everything"


def test_a_parameter_may_be_called_as_a_schema_key() -> None:
    """``title`` and ``schema`` are names like any other."""

    @tool
    async def book(title: str, schema: str) -> str:
        return title + schema

    assert set(book.parameters["properties"]) == {"title", "schema"}
    assert "title" not in book.parameters
    assert "title" not in book.parameters["properties"]["title"]


async def test_good_arguments_reach_the_function() -> None:
    """A whole number is a float too, and an absent argument has the function's own default."""
    assert await everything.run(GOOD) == "q 1.0 10"
    assert await everything.run(GOOD | {"limit": None}) == "q 1.0 None"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", 1),
        ("ratio", True),
        ("ratio", "1"),
        ("ratio", math.nan),
        ("ratio", math.inf),
        ("flag", 1),
        ("mode", "other"),
        ("tags", "a"),
        ("tags", [1]),
        ("counts", {"b": True}),
        ("counts", {"b": 1.0}),
        ("either", True),
        ("limit", 1.0),
        ("unknown", 1),
    ],
)
async def test_arguments_of_another_type_are_refused(name: str, value: object) -> None:
    """Nothing is converted; the message has the argument's name."""
    with pytest.raises(ValueError, match=rf"^invalid arguments: {name}[:.]"):
        await everything.run(GOOD | {name: value})


async def test_a_missing_argument_is_refused() -> None:
    """All that is wrong is said at once."""
    with pytest.raises(ValueError, match="query: Field required; ratio: Field required"):
        await everything.run({key: GOOD[key] for key in GOOD if key not in ("query", "ratio")})


def test_what_cannot_be_a_tool_is_refused_when_it_is_declared() -> None:
    """Each refusal names the tool and the parameter."""

    async def variadic(*xs: int) -> str:
        return ""

    async def keywords(**xs: int) -> str:
        return ""

    async def untyped(x) -> str:  # type: ignore[no-untyped-def]
        return ""

    async def opaque(x: set[int]) -> str:
        return ""

    async def nested(x: list[dict[int, str]]) -> str:
        return ""

    async def wrong_default(x: int = "1") -> str:  # type: ignore[assignment]
        return ""

    async def number() -> int:
        return 1

    refusals: dict[Any, str] = {
        variadic: "parameter 'xs' of tool 'variadic' is variadic",
        keywords: "parameter 'xs' of tool 'keywords' is variadic",
        untyped: "type of parameter 'x' of tool 'untyped' is None",
        opaque: "type of parameter 'x' of tool 'opaque' is set",
        nested: "type of parameter 'x' of tool 'nested'",
        wrong_default: "default of parameter 'x' of tool 'wrong_default' is '1'",
        number: "return type of tool 'number' is <class 'int'>, but must be str",
    }
    for function, message in refusals.items():
        with pytest.raises(ConfigError, match=message):
            tool(function)
    with pytest.raises(ConfigError, match="timeout of tool"):
        tool(timeout=0.0)(number)  # type: ignore[arg-type]


async def test_a_result_that_is_not_text_is_the_tools_mistake() -> None:
    """The model is not told; the run is."""

    async def number():  # type: ignore[no-untyped-def]
        return 1

    with pytest.raises(EnvironmentFailure, match="tool 'number' returned is 1, but must be text"):
        await tool(number).run({})


def test_a_call_ends_at_its_deadline() -> None:
    """The deadline is the tool's own, 600 s unless it says otherwise."""

    @tool
    async def forever() -> str:
        await anyio.sleep_forever()
        return ""

    @tool(timeout=30.0)
    async def hasty() -> str:
        await anyio.sleep_forever()
        return ""

    async def until_timeout(slow: Tool) -> float:
        with pytest.raises(RolloutTimeout, match=slow.name):
            await slow.run({})
        return anyio.current_time()

    assert run_virtual(until_timeout, forever) == 600.0
    assert run_virtual(until_timeout, hasty) == 30.0


async def test_a_tool_can_be_called_as_the_function_it_was() -> None:
    """Other tools and tests use it directly."""
    assert await everything("q", 0.5, True, "fast", [], {}, None, limit=3) == "q 0.5 3"


@pytest.mark.slow
def test_importing_tools_does_not_import_pydantic() -> None:
    """It is loaded by the first tool, so that importing asyncrl stays quick."""
    code = "import sys, asyncrl.rollout.tools, asyncrl.rollout.env; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class WordTokenizer:
    """One token for each run of letters, one for any other character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[str]:
        return re.findall(r"[a-zö]+|[^a-zö]", text)


def test_a_long_text_loses_its_middle() -> None:
    """Both ends are kept, about as much as is allowed, and the mark says how much is missing."""
    text = "start " + "word " * 500 + "end"
    short = elide(text, 100, WordTokenizer())
    assert 90 < len(WordTokenizer().encode(short, add_special_tokens=False)) <= 100
    assert short.startswith("start word")
    assert short.endswith("word end")
    assert "characters left out]" in short
    assert elide("start end", 100, WordTokenizer()) == "start end"


@given(text=st.text(alphabet="ab \nö", max_size=300), bound=st.integers(1, 60))
def test_what_is_left_is_never_longer_than_allowed(text: str, bound: int) -> None:
    """The mark counts too; a text that fits is not touched."""
    tokenizer = WordTokenizer()
    short = elide(text, bound, tokenizer)
    if len(tokenizer.encode(text, add_special_tokens=False)) <= bound:
        assert short == text
    assert short == "" or len(tokenizer.encode(short, add_special_tokens=False)) <= bound
