"""A scripted model plays environments through real renderers, and says where script and conversation part."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.errors import ConfigError, EnvironmentFailure, RolloutTimeout
from asyncrl.testing import Asked, ScriptedModel, ScriptEnded, call, run_virtual, scripted_policy
from asyncrl.testing.bytetokenizer import ByteTokenizer
from asyncrl.types import Message, Row, Trajectory, TruncationCause
from tests.rollout.families import FAMILIES, make_family_tokenizer


class _Sums(rl.Env):
    """Adds up. Plain functions, which run in threads."""

    def __init__(self) -> None:
        self.given: list[tuple[int, str]] = []

    def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": f"What is {row}?"}]

    @rl.tool
    def add(self, a: int, b: str) -> str:
        """Add."""
        time.sleep(0.01)
        self.given.append((a, b))
        return f"{a}+{b}"

    def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.final_text.endswith("42"))


_WORKS = sorted(name for name, family in FAMILIES.items() if not family.fatal)


@pytest.mark.slow
@pytest.mark.parametrize("name", _WORKS)
def test_it_speaks_as_the_models_of_each_template(name: str, tmp_path: Path) -> None:
    """Its call is token for token what a model of the family samples, and the tool gets the values that were meant."""
    family, tokenizer, env = FAMILIES[name], make_family_tokenizer(name, "bytes"), _Sums()
    tokenizer.save_pretrained(tmp_path)
    ends = tokenizer.convert_tokens_to_ids([family.eos, *family.ends])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    model = ScriptedModel([call("add", a=2, b="x y"), "42"], tokenizer=tmp_path)
    traj = run_virtual(model.play, env, "6*7")
    assert (env.given, traj.reward, traj.turns) == ([(2, "x y")], 1.0, 2)
    first = next(span.tokens for span in traj.spans if span.version is not None)
    said = model.renderer.real.tokenizer.decode(first.tolist(), clean_up_tokenization_spaces=False)
    if name == "brackets":  # which gives calls random names
        said = said.replace("call00000", "abcdefghi")
    if name == "json tags, reasoning":
        said = said.replace("\n</think>\n\n", "Hm </think>")
    assert said == family.turn


@pytest.mark.slow
def test_a_notation_that_nobody_reads_is_refused() -> None:
    """Instead of a call that silently becomes text."""
    model = ScriptedModel([call("add", a=2, b="x"), "42"], tokenizer=make_family_tokenizer("unknown notation", "bytes"))
    with pytest.raises(ConfigError, match="does not survive the chat template"):
        run_virtual(model.play, _Sums, "6*7")


@pytest.mark.slow
@settings(max_examples=30)
@given(said=st.text(max_size=20), value=st.text(max_size=20), number=st.integers())
@example(said="<|im_end|>", value='</tool_call>"}<|im_start|>', number=0)
@example(said="", value="", number=-1)
def test_any_text_and_any_argument_arrives(said: str, value: str, number: int) -> None:
    """The built-in tokenizer writes every text, and no text becomes a token that ends a turn."""
    env = _Sums()
    model = ScriptedModel([[said, call("add", a=number, b=value)], f"{said}42"])
    traj = run_virtual(model.play, env, "6*7")
    assert env.given == [(number, value)]
    assert traj.final_text == f"{said}42"
    assert traj.messages[1]["content"] == said.strip()


def test_several_calls_of_a_turn_are_answered_in_their_order() -> None:
    """With the text before them in the same message; the transcript shows it all."""
    model = ScriptedModel([["Both.", call("add", a=1, b="x"), call("add", a=2, b="y"), call("sub")], "42"])
    run_virtual(model.play, _Sums, "6*7")
    assert model.transcript.splitlines() == [
        "user: What is 6*7?",
        "assistant: Both.",
        "assistant calls add(a=1, b='x')",
        "assistant calls add(a=2, b='y')",
        "assistant calls sub()",
        "tool add: 1+x",
        "tool add: 2+y",
        "tool sub: error: there is no tool 'sub'; there are: add",
        "assistant: 42",
        "reward 1.0",
    ]


def test_a_turn_that_the_script_has_not_is_an_error() -> None:
    """It says which turn, what the script is, and what was said so far."""
    model = ScriptedModel([call("add", a=1, b="x")])
    with pytest.raises(ScriptEnded) as raised:
        run_virtual(model.play, _Sums, "6*7")
    for part in ("asks for turn 2", "has 1: call add(a=1, b='x')", "user: What is 6*7?", "tool add: 1+x"):
        assert part in str(raised.value)


def test_turns_that_nobody_asked_for_are_an_error() -> None:
    """Unless the test says that it may be so."""
    model = ScriptedModel(["41", "42", "43"])
    with pytest.raises(ScriptEnded, match=r"ended with turn 1 \(the environment ended it\).*2 were not asked for"):
        run_virtual(model.play, _Sums, "6*7")
    assert run_virtual(lambda: model.play(_Sums, "6*7", whole=False)).reward == 0.0


def test_a_budget_truncates_as_in_a_run() -> None:
    """A long turn takes several requests, and is cut where its budget ends."""
    model = ScriptedModel(["x" * 100])
    traj = run_virtual(lambda: model.play(_Sums, "6*7", budget=rl.Budget(max_generated_tokens=64, segment_tokens=10)))
    assert (traj.truncated, traj.segments, traj.final_text) == (TruncationCause.GENERATED_TOKENS, 7, "x" * 64)
    assert model.transcript.endswith("reward 0.0, truncated (generated_tokens)")
    with pytest.raises(ScriptEnded, match="truncated by its turns budget"):
        model = ScriptedModel([call("add", a=1, b="x"), "42"])
        run_virtual(lambda: model.play(_Sums, "6*7", budget=rl.Budget(max_turns=1)))


@pytest.mark.parametrize("where", ["reset", "reward", "close", "on_turn"])
@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), rl.InfrastructureError("no sandbox")])
def test_what_an_environment_raises_is_raised_as_it_is(where: str, error: Exception) -> None:
    """The same object, at once; but for ``close``, whose failure a run survives."""

    async def fail(self: Any, *args: object) -> None:
        raise error

    kind = type("Broken", (_Sums,), {where: fail})
    model = ScriptedModel(["42"])
    if where == "close":
        with pytest.raises(EnvironmentFailure, match=r"close\(\) of Broken failed: .*" + str(error)):
            run_virtual(model.play, kind, "6*7")
        return
    with pytest.raises(type(error)) as raised:
        run_virtual(model.play, kind, "6*7")
    assert raised.value is error


def test_a_function_is_a_script_for_every_member_of_every_group() -> None:
    """It sees the conversation and the member, and the model is the sampler of an ordinary engine."""

    def script(asked: Asked) -> Any:
        assert asked.messages[0]["role"] == "user"
        if asked.turn:
            return asked.messages[-1]["content"]
        return call("add", a=asked.member, b="42") if asked.member else "42"

    async def work() -> dict[str, list[float | None]]:
        model = ScriptedModel(script)
        engine = rl.RolloutEngine(scripted_policy(sampler=model), env=_Sums, renderer=model.renderer)
        groups = [group async for group in engine.rollout(["a", "b"], group_size=3)]
        assert model.transcript.count("user: What is") == 6
        return {group.row: [traj.turns for traj in group.members_G] for group in groups}

    assert run_virtual(work, seed=1) == {"a": [1, 2, 2], "b": [1, 2, 2]}


def test_a_function_may_end_its_script() -> None:
    """By giving None."""
    with pytest.raises(ScriptEnded, match=r"asks for turn 1, but the script .* gave None"):
        run_virtual(ScriptedModel(lambda asked: None).play, _Sums, "6*7")


def test_an_engine_needs_the_renderer_of_the_model() -> None:
    """With another one the model would not know what it is asked."""
    model = ScriptedModel(["42"])
    engine = rl.RolloutEngine(
        scripted_policy(sampler=model),
        env=_Sums,
        renderer=ScriptedModel([]).renderer,
        failures=rl.Failures(consecutive=1),
    )

    async def work() -> None:
        async for _ in engine.rollout(["a"], group_size=1):
            pass

    with pytest.raises(ConfigError, match=r"renderer=model\.renderer"):
        run_virtual(work)


@pytest.mark.parametrize("script", ["42", 42, None])
def test_what_is_no_script_is_refused(script: Any) -> None:
    """A text alone would be a turn for each letter."""
    with pytest.raises(ConfigError, match="a list of turns"):
        ScriptedModel(script)


def test_a_turn_of_something_else_is_refused() -> None:
    """With its place."""
    with pytest.raises(ConfigError, match="turn 2 of the script is 42"):
        ScriptedModel(["42", 42])  # type: ignore[list-item]


async def test_it_plays_on_a_real_loop_too() -> None:
    """For tests that are coroutines already."""
    assert (await ScriptedModel(["42"]).play(_Sums(), "6*7")).reward == 1.0


@given(text=st.text())
@example(text="<tool_call>\ud800</tool_call>")
def test_the_tokenizer_in_memory_gives_back_every_text(text: str) -> None:
    """Its vocabulary is bytes; a surrogate that stands alone is no text."""
    tokenizer = ByteTokenizer()
    back = tokenizer.decode(tokenizer.encode(text))
    assert back == text or "\ud800" in text


class _Blocking(_Sums):
    """Tools that block in each way, and one that never returns."""

    release = threading.Event()

    @rl.tool
    async def wait(self, way: str) -> str:
        """Block for a while, out of the loop."""
        if way == "asyncio":
            await asyncio.to_thread(time.sleep, 0.05)
        else:
            await anyio.to_thread.run_sync(time.sleep, 0.05)
        return "42"

    @rl.tool(timeout=5.0)
    def hang(self) -> str:
        """Hang."""
        self.release.wait(20)
        return "late"

    def close(self) -> None:  # type: ignore[override]
        time.sleep(0.05)


@pytest.mark.parametrize("way", ["asyncio", "anyio"])
def test_blocking_takes_no_time_of_the_virtual_clock(way: str) -> None:
    """A deadline of less than a real thread's switch does not pass while the thread works."""

    async def work() -> float:
        with anyio.fail_after(0.001):
            traj = await ScriptedModel([call("wait", way=way), call("add", a=1, b="x"), "42"]).play(_Blocking, "")
        assert traj.reward == 1.0
        return anyio.current_time()

    assert run_virtual(work) == 0.0


class _Hanging(_Blocking):
    async def close(self) -> None:  # type: ignore[override]
        """Without a thread, which may take longer than the clock waits for one."""


def test_a_tool_that_never_returns_meets_its_deadline() -> None:
    """After ``grace_s`` real seconds the clock goes on, and is then at the tool's deadline."""

    async def work() -> None:
        with pytest.raises(RolloutTimeout, match=r"'hang' ran past its deadline of 5\.0 s"):
            await ScriptedModel([call("hang"), "42"]).play(_Hanging, "")
        assert anyio.current_time() == 5.0

    _Blocking.release.clear()
    threading.Timer(0.2, _Blocking.release.set).start()
    run_virtual(work, grace_s=0.05)
