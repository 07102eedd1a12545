"""However much a model writes, or a tool says in its errors: what is answered and what is shown stays bounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.rollout.toolcalls import ParsedTurn, parse_hermes
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ByteRenderer, ScriptedSampler
from asyncrl.types import IntArray, Message, Trajectory
from tests.faults.case import Case, One


class _Counting(ByteRenderer):
    """Reads Hermes calls; keeps what it was asked to render."""

    def __init__(self) -> None:
        self.rendered: list[list[Message]] = []

    async def parse(self, turn_ids: IntArray, tools: Any = ()) -> ParsedTurn:
        return parse_hermes(self.text(turn_ids))

    async def continuation(self, before: Any, new: Sequence[Message], turn_ids: IntArray, tools: Any) -> IntArray:
        self.rendered.append([*before, *new])
        return np.full(1, 66, np.int32)


def _call(name: str, index: int) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'n': index}})}</tool_call>"


def _talk(said: str, tools: Sequence[Any] = (), **budget: Any) -> tuple[list[Trajectory], _Counting]:
    """Four members that say ``said``, and then no more."""
    renderer = _Counting()

    class Talks(One):
        open = 0

    def tokens(request: SegmentRequest) -> list[int]:
        return [END] if END in request.input_ids else [*said.encode(), END]

    Talks.tools = tuple(tools)
    room = rl.Budget(segment_tokens=10**7, max_generated_tokens=10**7, max_context_tokens=2 * 10**7, **budget)
    case = Case(Talks, sampler=ScriptedSampler(tokens=tokens), engine={"renderer": renderer, "budget": room})
    case.play(1, rows=1)
    return list(case.steps[0].trajectories), renderer


RUN: list[int] = []


@rl.tool
async def work(n: int) -> str:
    """Work."""
    RUN.append(n)
    return f"did {n}"


@pytest.mark.slow
@given(st.integers(0, 300), st.integers(1, 80), st.sampled_from(["work", "unknown", "mixed", "unreadable"]))
@settings(derandomize=True, max_examples=25, deadline=None)
def test_no_more_calls_are_answered_than_the_budget_has(written: int, most: int, kind: str) -> None:
    """The first ones, in their order; one message says how many are left out; the messages name no other call."""
    RUN.clear()
    names = {"mixed": ["work", "unknown"], "unreadable": ["work"]}.get(kind, [kind])
    calls = [_call(names[index % len(names)], index) for index in range(written)]
    if kind == "unreadable":
        calls[1::2] = ["<tool_call>{</tool_call>" for _ in calls[1::2]]
    trajectories, renderer = _talk("".join(calls), [work], max_turn_calls=most)
    answered = min(written, most)
    for traj in trajectories:
        replies = [message for message in traj.messages if message["role"] == "tool"]
        assert len(replies) == answered + (written > most)
        if written > most:
            assert f"{written - most} in all, were left out" in replies[-1]["content"]
            assert len(replies[-1]["content"]) < 250
        assert traj.metrics.get("tool_calls", 0.0) == len(replies)
        asked = next(message for message in traj.messages if message["role"] == "assistant").get("tool_calls", [])
        assert {call["id"] for call in asked} <= {message["tool_call_id"] for message in replies}
        run = [index for index in range(answered) if names[index % len(names)] == "work"]
        run = [index for index in run if kind != "unreadable" or index % 2 == 0]
        assert RUN[: len(run)] == run or sorted(RUN) == sorted(run * 2)
    for rendered in renderer.rendered:
        assert sum(len(message.get("tool_calls", ())) for message in rendered) <= most + 1


@pytest.mark.slow
def test_thousands_of_calls_of_one_turn_are_a_short_answer() -> None:
    """With the defaults."""
    [first, *_], _ = _talk("".join(_call("a", 0) for _ in range(4000)))
    replies = [message for message in first.messages if message["role"] == "tool"]
    assert len(replies) == 65
    assert len(json.dumps(replies)) < 20_000


HUGE = "x" * 100_000


def _tool(fault: str) -> Any:
    async def run(n: int) -> str:
        if fault == "raises":
            raise ValueError(HUGE)
        raise KeyError({"a": [HUGE] * 2})

    run.__name__ = "work"
    return rl.tool(run)


@pytest.mark.parametrize(
    ("said", "fault", "start"),
    [
        (_call("work", 1), "raises", "error: ValueError: xxx"),
        (_call("work", 1), "raises more", "error: KeyError: {'a': ['xxx"),
        (_call(HUGE, 1), "", "error: there is no tool 'xxx"),
        (
            f'<tool_call>{{"name": "work", "arguments": {{"{HUGE}": 1}}}}</tool_call>',
            "",
            "error: ValueError: invalid arg",
        ),
        (
            f'<tool_call>{{"name": "work", "arguments": {{"n": "{HUGE}"}}}}</tool_call>',
            "",
            "error: ValueError: invalid arg",
        ),
        (f'<tool_call>{{"name": "{HUGE}"}}, 1</tool_call>', "", "error: the tool call"),
        (f"<tool_call>{HUGE}</tool_call>", "", "error: there is no tool"),
    ],
    ids=range(7),
)
def test_no_error_shown_to_the_model_is_long(said: str, fault: str, start: str) -> None:
    """Whoever wrote what it says; its beginning and its end are there. Nothing of it becomes the name of a metric."""
    trajectories, _ = _talk(said, [_tool(fault)])
    for traj in trajectories:
        [reply] = [message for message in traj.messages if message["role"] == "tool"]
        assert reply["content"].startswith(start)
        assert len(json.dumps(reply)) < 3000
        assert all(len(key) < 100 for key in (*traj.metrics, *traj.seconds))


@pytest.mark.parametrize("most", [0, -1, 1.5, None, "many"])
def test_the_number_of_calls_is_a_positive_integer(most: Any) -> None:
    """As the other bounds."""
    with pytest.raises(ConfigError, match=r"budget\.max_turn_calls is "):
        rl.Budget(max_turn_calls=most)
