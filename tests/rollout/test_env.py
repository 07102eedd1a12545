from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from asyncrl.errors import ConfigError, EnvironmentFailure, InfrastructureError, RolloutTimeout
from asyncrl.rollout.calls import UserCalls, _threads, call_user
from asyncrl.rollout.env import Env, TurnResult, env_factory
from asyncrl.rollout.tools import Tool, tool
from asyncrl.testing.clock import run_virtual
from asyncrl.types import Message, Row, ToolCall, Trajectory, TruncationCause


class Plain(Env):
    """An environment without tools."""

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": str(row)}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return 1.0


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


class Workshop(Plain):
    """Methods as tools: slow ones, and such that fail."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @tool
    async def wait(self, seconds: float) -> str:
        """Wait."""
        self.log.append("wait")
        await anyio.sleep(seconds)
        return f"waited {seconds}"

    @tool
    async def fail(self, kind: str) -> str:
        """Fail in that way."""
        errors = {
            "value": ValueError("bad value"),
            "timeout": TimeoutError("no answer"),
            "connection": ConnectionResetError("gone"),
            "infrastructure": InfrastructureError("sandbox died"),
            "not text": EnvironmentFailure("no text"),
        }
        if kind.startswith("group of "):
            raise ExceptionGroup("tasks", [errors[kind.removeprefix("group of ")], ValueError("another")])
        raise errors[kind]

    @tool(timeout=5.0)
    async def hang(self) -> str:
        """Never answer."""
        await anyio.sleep_forever()
        return ""


def call(name: str, id: str = "", **arguments: Any) -> ToolCall:
    """A call as a model writes it."""
    return ToolCall(name=name, arguments=arguments, id=id)


async def test_a_turn_without_calls_ends_the_conversation(traj: Trajectory) -> None:
    """That is the default answer."""
    assert await Plain().on_turn(traj) is None


def test_calls_run_together_and_are_answered_in_their_order(traj: Trajectory) -> None:
    """Three calls take as long as the longest, and the results keep names and ids."""
    traj.tool_calls = [call("wait", "x", seconds=3.0), call("wait", "y", seconds=1.0), call("wait", "z", seconds=2.0)]

    async def answer() -> tuple[Any, float]:
        return await Workshop().on_turn(traj), anyio.current_time()

    messages, now = run_virtual(answer)
    assert now == 3.0
    assert messages == [
        {"role": "tool", "name": "wait", "tool_call_id": "x", "content": "waited 3.0"},
        {"role": "tool", "name": "wait", "tool_call_id": "y", "content": "waited 1.0"},
        {"role": "tool", "name": "wait", "tool_call_id": "z", "content": "waited 2.0"},
    ]
    assert traj.metrics == {"tool_calls": 3, "tool_calls/wait": 3, "tool_errors": 0, "tool_seconds": 6.0}


async def test_what_the_model_did_wrong_is_told_to_it_and_counted(traj: Trajectory) -> None:
    """Unreadable calls, unknown names, wrong arguments and exceptions of a tool are text; none ends the trajectory."""
    traj.tool_calls = [
        ToolCall(name="", arguments=None, error="not JSON"),
        call("unknown"),
        call("wait", seconds="long"),
        call("fail", kind="value"),
        call("fail", kind="group of value"),
        call("wait", seconds=0.0),
    ]
    messages = await Workshop().on_turn(traj)
    assert isinstance(messages, list)
    assert [message["content"] for message in messages] == [
        "error: the tool call was not run: not JSON",
        "error: there is no tool 'unknown'; there are: fail, hang, wait",
        "error: ValueError: invalid arguments: seconds: Input should be a valid number",
        "error: ValueError: bad value",
        "error: ValueError: bad value",
        "waited 0.0",
    ]
    assert traj.metrics["tool_errors"] == 5
    assert traj.metrics["tool_calls"] == 6
    assert {key for key in traj.metrics if key.startswith("tool_calls/")} == {"tool_calls/wait", "tool_calls/fail"}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("timeout", TimeoutError),
        ("connection", ConnectionResetError),
        ("infrastructure", None),
        ("group of connection", ConnectionResetError),
        ("group of infrastructure", None),
    ],
)
def test_what_the_machinery_did_wrong_ends_the_trajectory(
    traj: Trajectory, kind: str, cause: type[Exception] | None, beside: bool
) -> None:
    """It rises as one InfrastructureError with its cause, alone or beside calls that still run, and is not counted."""
    others = [call("wait", seconds=100.0)] if beside else []
    traj.tool_calls = [*others, call("fail", kind=kind)]

    async def answer() -> float:
        with pytest.raises(InfrastructureError) as caught:
            await Workshop().on_turn(traj)
        if cause is not None:
            assert isinstance(caught.value.__cause__, cause)
            assert str(caught.value).startswith(f"tool 'fail': {cause.__name__}: ")
        return anyio.current_time()

    assert run_virtual(answer) == 0.0
    assert traj.metrics == {}


async def test_a_tool_that_breaks_its_contract_is_not_the_models_fault(traj: Trajectory) -> None:
    """Errors of asyncrl itself pass through as they are."""
    traj.tool_calls = [call("fail", kind="not text")]
    with pytest.raises(EnvironmentFailure, match="no text"):
        await Workshop().on_turn(traj)


def test_a_tool_that_never_returns_meets_its_deadline(traj: Trajectory) -> None:
    """Its deadline is the tool's, and it rises as a timeout."""
    traj.tool_calls = [call("hang"), call("wait", seconds=1.0)]

    async def answer() -> float:
        with pytest.raises(RolloutTimeout, match=r"'hang' ran past its deadline of 5\.0 s"):
            await Workshop().on_turn(traj)
        return anyio.current_time()

    assert run_virtual(answer) == 5.0


def test_cancelling_a_turn_cancels_its_tools(traj: Trajectory) -> None:
    """Nothing of the turn has been counted, so it can be answered again."""
    traj.tool_calls = [call("wait", seconds=100.0), call("wait", seconds=100.0)]

    async def answer() -> float:
        with anyio.move_on_after(1.0) as scope:
            await Workshop().on_turn(traj)
        assert scope.cancelled_caught
        return anyio.current_time()

    assert run_virtual(answer) == 1.0
    assert traj.metrics == {}


async def test_decorated_methods_are_tools_of_their_own_environment(traj: Trajectory) -> None:
    """``self`` is the environment that the trajectory runs in, whether they were collected or listed."""

    class Listed(Workshop):
        tools = (Workshop.wait, echo)

    traj.tool_calls = [call("wait", seconds=0.0)]
    for kind in (Workshop, Listed):
        env, other = kind(), kind()
        await env.on_turn(traj)
        assert (env.log, other.log) == (["wait"], [])
    assert await env.wait(0.0) == "waited 0.0"


def test_collected_tools_are_inherited_and_replaced_by_name() -> None:
    """A subclass adds its own; one of the same name takes the place; an explicit list stands alone."""

    class More(Workshop):
        @tool
        async def hang(self, a: int) -> str:
            """Another one."""
            return ""

        @tool
        async def extra(self) -> str:
            """One more."""
            return ""

    class Only(Workshop):
        tools = (echo,)

    assert [t.name for t in Workshop.tools] == ["wait", "fail", "hang"]
    assert [t.name for t in More.tools] == ["wait", "fail", "hang", "extra"]
    assert More.tools[2].description == "Another one."
    assert [t.name for t in Only.tools] == ["echo"]
    assert Plain.tools == ()


async def test_plain_functions_run_in_a_thread() -> None:
    """Methods of an environment need not be asynchronous, and then never run on the event loop."""

    class Blocking(Env):
        def reset(self, row: Row) -> list[Message]:
            return [{"role": "user", "content": threading.current_thread().name}]

        def reward(self, traj: Trajectory, row: Row) -> float:
            return float(row)

    messages = await call_user(Blocking().reset, 3)
    assert messages[0]["content"] != threading.current_thread().name
    assert await call_user(Blocking().reward, None, 3) == 3.0


async def test_a_plain_function_may_return_an_awaitable() -> None:
    """A wrapper that does not look asynchronous is still awaited on the event loop."""
    assert await call_user(lambda: echo("hi")) == "hi"


async def test_threads_of_user_functions_are_bounded() -> None:
    """Of forty calls that block, thirty-two run and eight wait for a thread."""
    release = threading.Event()
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(call_user, release.wait)
            await anyio.wait_all_tasks_blocked()
            threads = _threads().statistics()
            release.set()
    finally:
        release.set()
    assert (threads.borrowed_tokens, threads.tasks_waiting) == (32, 8)


async def test_a_call_of_user_code_has_a_deadline() -> None:
    """A plain function cannot be ended, but nobody waits for it any longer."""
    release = threading.Event()
    try:
        with pytest.raises(RolloutTimeout, match=r"wait ran past its deadline of 0\.01 s"):
            await call_user(release.wait, timeout=0.01)
    finally:
        release.set()
    with pytest.raises(RolloutTimeout, match="sleep_forever"):
        await call_user(anyio.sleep_forever, timeout=0.01)


@pytest.mark.virtual_clock
async def test_each_call_of_a_trajectory_has_its_own_deadline() -> None:
    """Three calls of eight seconds are in time with a deadline of ten; the one that is late is named."""
    with UserCalls(10.0) as calls:
        for _ in range(3):
            await calls(anyio.sleep, 8)
        await anyio.sleep(100)
        await calls(anyio.sleep, 8)
    assert anyio.current_time() == 132
    with pytest.raises(RolloutTimeout, match=r"sleep ran past its deadline of 10\.0 s"), UserCalls(10.0) as calls:
        await calls(anyio.sleep, 9)
        await calls(anyio.sleep, 11)
    assert anyio.current_time() == 132 + 9 + 10


@pytest.mark.virtual_clock
async def test_calls_that_are_under_way_together_are_each_late_by_their_own_beginning() -> None:
    """Two trajectories begin five seconds apart: one is in time, and each of the others ends after its ten seconds."""
    ended: dict[str, float] = {}

    async def late(name: str, calls: UserCalls) -> None:
        with pytest.raises(RolloutTimeout, match="sleep"):
            await calls(anyio.sleep, 50)
        ended[name] = anyio.current_time()

    with UserCalls(10.0) as calls:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late, "first", calls)
            tasks.start_soon(calls, anyio.sleep, 2)
            await anyio.sleep(5)
            tasks.start_soon(late, "second", calls)
    assert ended == {"first": 10, "second": 15}


@pytest.mark.virtual_clock
async def test_a_late_call_ends_whatever_scopes_it_has_of_its_own() -> None:
    """User code may have deadlines and task groups; the task is not left cancelled."""

    async def scopes() -> None:
        with anyio.move_on_after(100):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep, 50)

    for _ in range(2):
        with pytest.raises(RolloutTimeout, match="scopes"), UserCalls(10.0) as calls:
            await calls(scopes)
        await anyio.sleep(1)
    assert anyio.current_time() == 2 * (10 + 1)


@pytest.mark.virtual_clock
async def test_a_cancellation_from_outside_counts_for_more_than_a_deadline() -> None:
    """Both at the same moment: the block around the call is cancelled, and not told of a timeout."""
    with anyio.move_on_after(10) as scope, UserCalls(10.0) as calls:
        await calls(anyio.sleep, 50)
    assert scope.cancelled_caught
    await anyio.sleep(1)
    assert anyio.current_time() == 11


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("row")])
async def test_an_error_of_user_code_is_raised_as_it_is(error: Exception) -> None:
    """A reward that raises must not look like anything else."""

    def reward() -> float:
        raise error

    with pytest.raises(type(error)) as caught:
        await call_user(reward)
    assert caught.value is error


async def test_a_lost_connection_in_user_code_is_infrastructure() -> None:
    """A grader that cannot be reached has not judged."""

    async def reward() -> float:
        raise ConnectionRefusedError("port 80")

    with pytest.raises(InfrastructureError, match=r"reward: ConnectionRefusedError: port 80"):
        await call_user(reward)


async def test_truncation_is_worth_nothing_by_default(traj: Trajectory) -> None:
    """Closing does nothing by default, either."""
    env = Plain()
    assert await env.on_truncated(traj, None, TruncationCause.TURNS) == 0.0
    await env.close()


def test_an_instance_is_shared_and_a_class_or_factory_is_not() -> None:
    """Who made an environment closes it."""
    env = Plain()
    shared = env_factory(env)
    assert (shared.create(), shared.create(), shared.owned) == (env, env, False)

    def make() -> Env:
        return Plain()

    factories: list[Callable[[], Env]] = [Plain, make, functools.partial(Plain)]
    for source in factories:
        factory = env_factory(source)
        first, second = factory.create(), factory.create()
        assert isinstance(first, Plain)
        assert first is not second
        assert factory.owned


def test_what_is_not_an_environment_is_refused() -> None:
    """As early as it can be seen: a factory's result when it is made."""

    class Needy(Plain):
        def __init__(self, url: str) -> None:
            self.url = url

    class Unfinished(Env):
        async def reset(self, row: Row) -> list[Message]:
            return []

    wrong: dict[Any, str] = {
        3: "env is 3, but must be an Env",
        dict: "env is <class 'dict'>",
        Needy: "must be callable without arguments: missing a required argument: 'url'",
        Unfinished: r"env Unfinished lacks the method\(s\) reward",
    }
    for env, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            env_factory(env)
    with pytest.raises(ConfigError, match="what env makes is 3"):
        env_factory(lambda: 3).create()  # type: ignore[arg-type, return-value]


def test_a_contradictory_environment_is_refused() -> None:
    """Unknown recovery, recovery without its methods, and tools that the model could not tell apart."""

    class Unknown(Plain):
        recovery = "retry"  # type: ignore[assignment]

    class Snapshot(Plain):
        recovery = "snapshot"

        async def snapshot(self, traj: Trajectory) -> Any:
            return {}

    class Twins(Plain):
        tools = (echo, echo)

    class Bare(Plain):
        tools = (len,)  # type: ignore[assignment]

    class Late(Plain):
        @property
        def tools(self) -> Sequence[Tool]:  # type: ignore[override]
            return (echo,)

    wrong: dict[type[Env], str] = {
        Unknown: r"Unknown\.recovery is 'retry'",
        Snapshot: "does not define both snapshot and restore",
        Twins: r"Twins\.tools is \['echo', 'echo'\]",
        Bare: r"Bare\.tools is .* functions decorated with tool",
    }
    for kind, message in wrong.items():
        for source in (kind, kind()):
            with pytest.raises(ConfigError, match=message):
                env_factory(source)
        with pytest.raises(ConfigError, match=message):
            env_factory(lambda kind=kind: kind()).create()  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"Late\.tools is <property"):
        env_factory(Late)


def test_a_turns_bound_is_positive() -> None:
    """A turn of no tokens could never end."""
    assert TurnResult([], 5).max_turn_tokens == 5
    with pytest.raises(ConfigError, match=r"TurnResult\.max_turn_tokens is 0"):
        TurnResult([], max_turn_tokens=0)
