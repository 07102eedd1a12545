"""The environment: what a conversation starts with, how it goes on, and what it was worth.

A user subclasses ``Env``. Its methods may be asynchronous, or plain functions, which then run in a thread and never on
the event loop. The default ``on_turn`` runs the tool calls of a turn together and answers in their order.

An ordinary exception of a tool is text for the model. A timeout, a lost connection or an ``InfrastructureError`` is not
the model's fault: it ends the trajectory. Whether that is tried again is the group's business.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import anyio

from asyncrl.concurrency.endings import LazyCoroutine, first_error
from asyncrl.errors import AsyncRLError, ConfigError, require_choice
from asyncrl.plain import error_text, shortened
from asyncrl.rollout.border import TurnResult
from asyncrl.rollout.calls import blamed
from asyncrl.rollout.tools import Tool
from asyncrl.rollout.usercode import place_of
from asyncrl.types import Message, Row, ToolCall, Trajectory, TruncationCause

__all__ = ["Env", "EnvFactory", "Recovery", "TurnResult", "env_factory"]

Recovery: TypeAlias = Literal["drop", "stateless", "snapshot"]

_ERROR = "error: "
_NAME, _REASON = 100, 500
# Characters of a tool's name that a model made up, and of what a parser says about a call, which may quote it.


class Env(ABC):
    """One task. Pass the class or a factory, and each trajectory gets its own, closed at its end; pass an instance, and
    all trajectories share it and nobody closes it.

    Example::

        class Sums(rl.Env):
            async def reset(self, row):
                return [{"role": "user", "content": f"{row['a']} + {row['b']} ="}]

            async def reward(self, traj, row):
                return float(traj.final_text.strip() == str(row["a"] + row["b"]))
    """

    tools: Sequence[Tool] = ()
    """What the model may call. Methods decorated with ``tool`` are added, unless the class sets this itself."""
    recovery: Recovery = "drop"
    """What a resumed run does with an unfinished trajectory: start it anew, go on with a fresh environment
    (``stateless``), or with one that ``restore`` brought back (``snapshot``)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "tools" not in vars(cls):
            declared = {value.name: value for value in vars(cls).values() if isinstance(value, Tool)}
            cls.tools = tuple(({tool.name: tool for tool in cls.tools} | declared).values())

    @abstractmethod
    def reset(self, row: Row) -> list[Message] | Awaitable[list[Message]]:
        """Begin a conversation: the messages that the model reads first."""

    async def on_turn(self, traj: Trajectory) -> list[Message] | TurnResult | None:
        """Answer the last turn with new messages, or end the conversation with None.

        By default: the results of the turn's tool calls, in their order; None if it has no call.
        """
        return await _run_tools(self, traj) if traj.tool_calls else None

    @abstractmethod
    def reward(self, traj: Trajectory, row: Row) -> float | Awaitable[float]:
        """What the finished conversation is worth: a finite number. Raising drops the trajectory."""

    async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
        """What a conversation is worth that ran out of budget; 0.0 by default."""
        return 0.0

    async def snapshot(self, traj: Trajectory) -> Any:
        """A JSON value from which ``restore`` brings this environment back (``recovery="snapshot"``).

        In a run with checkpoints it is called after ``reset`` and after each answer, before the next request leaves; a
        call that was cut off by the end of a process is made again after ``restore``.
        """
        raise NotImplementedError

    async def restore(self, traj: Trajectory, state: Any) -> None:
        """Bring a fresh environment to where ``snapshot`` was taken, instead of ``reset``."""
        raise NotImplementedError

    async def close(self) -> None:  # noqa: B027  most environments hold nothing, so it is not abstract
        """Free what the environment holds. Called once, also after an error or cancellation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFactory:
    """Where trajectories get their environment."""

    create: Callable[[], Env]
    owned: bool
    """True if each trajectory has its own and closes it."""
    tools: tuple[Tool, ...] = ()
    """Its tools, as far as they are known without making one."""
    answers: bool = False
    """True if it has an answer of its own to turns, which may need no results of tools."""


def env_factory(env: Env | Callable[[], Env]) -> EnvFactory:
    """Take an instance, a class or a function without arguments. Raises ``ConfigError`` for anything else."""
    if isinstance(env, Env):
        _check(env)
        return _factory_of(type(env), create=lambda: env, owned=False)
    if not callable(env) or (isinstance(env, type) and not issubclass(env, Env)):
        raise ConfigError.for_value(
            "env", env, "an Env, a subclass of it, or a function without arguments that makes one"
        )
    made = env.func if isinstance(env, partial) else env
    if isinstance(made, type) and issubclass(made, Env):
        if missing := sorted(getattr(made, "__abstractmethods__", ())):
            raise ConfigError(f"env {made.__name__} lacks the method(s) {', '.join(missing)}")
        _check(made)
    try:
        inspect.signature(env).bind()
    except TypeError as error:
        raise ConfigError(f"env {env!r} must be callable without arguments: {error}") from error
    return _factory_of(made, create=_checking(env), owned=True)


def _factory_of(kind: object, *, create: Callable[[], Env], owned: bool) -> EnvFactory:
    """Of what ``create`` makes the tools are known beforehand only if ``kind`` is its class."""
    if not isinstance(kind, type) or not issubclass(kind, Env):
        return EnvFactory(create=create, owned=owned)
    return EnvFactory(create=create, owned=owned, tools=tuple(kind.tools), answers=kind.on_turn is not Env.on_turn)


def _checking(make: Callable[[], Env]) -> Callable[[], Env]:
    """``make``, with each class that it makes checked once: there is an environment for each trajectory."""
    known: set[type] = set()

    def create() -> Env:
        env = make()
        if type(env) not in known or env.tools is not type(env).tools:
            _check(env)
            known.add(type(env))
        return env

    return create


def _check(env: Env | type[Env]) -> None:
    """Check what the type system cannot; works on a class too, so that a mistake shows before anything starts."""
    kind = env if isinstance(env, type) else type(env)
    if not issubclass(kind, Env):
        raise ConfigError.for_value("what env makes", env, "an Env")
    require_choice(f"{kind.__name__}.recovery", env.recovery, Recovery)
    if env.recovery == "snapshot" and (kind.snapshot is Env.snapshot or kind.restore is Env.restore):
        raise ConfigError(f"{kind.__name__}.recovery is 'snapshot', but it does not define both snapshot and restore")
    if not isinstance(env.tools, Sequence) or not all(isinstance(tool, Tool) for tool in env.tools):
        raise ConfigError.for_value(f"{kind.__name__}.tools", env.tools, "a sequence of functions decorated with tool")
    names = [tool.name for tool in env.tools]
    if len(set(names)) < len(names):
        raise ConfigError.for_value(f"{kind.__name__}.tools", names, "tools with different names")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """What came of one tool call."""

    content: str
    failed: bool
    seconds: float = 0.0
    where: str = ""
    """The user's line, if the tool raised."""


async def _run_tools(env: Env, traj: Trajectory) -> list[Message]:
    """Run the calls of the last turn together. Nothing is counted before all have ended: it may have to run again."""
    tools = {tool.name: tool for tool in env.tools}
    calls = traj.tool_calls
    replies = [await _reply(calls[0], tools, env)] if len(calls) == 1 else await _together(calls, tools, env)
    for call, reply in zip(calls, replies, strict=True):
        traj.add_metric("tool_calls", 1.0)
        traj.add_metric("tool_errors", 1.0 if reply.failed else 0.0)
        traj.add_metric("tool_seconds", reply.seconds)
        if reply.where:
            traj.tool_failures.append((call.name, reply.content.removeprefix(_ERROR), reply.where))
        if call.name in tools:  # what a model makes up must not become a metric
            traj.add_seconds(f"tool {call.name}", reply.seconds)
            traj.add_metric(f"tool_calls/{call.name}", 1.0)
    return [
        {"role": "tool", "name": call.name[:_NAME], "tool_call_id": call.id, "content": reply.content}
        for call, reply in zip(calls, replies, strict=True)
    ]


async def _together(calls: Sequence[ToolCall], tools: Mapping[str, Tool], env: Env) -> list[_Reply]:
    replies: dict[int, _Reply] = {}

    async def run(index: int, call: ToolCall) -> None:
        replies[index] = await _reply(call, tools, env)

    try:
        async with anyio.create_task_group() as tasks:
            for index, call in enumerate(calls):
                tasks.start_soon(LazyCoroutine, run, index, call)
        return [replies[index] for index in range(len(calls))]
    except ExceptionGroup as group:
        failure = first_error(group)
    raise failure


async def _reply(call: ToolCall, tools: Mapping[str, Tool], env: Env) -> _Reply:
    """Run one call. Raises ``AsyncRLError`` for a failure that is not the model's; of others the model reads."""
    if call.arguments is None:
        name = f" of {call.name[:_NAME]!r}" if call.name else ""
        content = f"error: the tool call{name} was not run: {shortened(call.error, _REASON)}"
        return _Reply(content=content, failed=True)
    if call.name not in tools:
        known = ", ".join(sorted(tools)) or "none"
        return _Reply(content=f"error: there is no tool {call.name[:_NAME]!r}; there are: {known}", failed=True)
    time = asyncio.get_running_loop().time
    started = time()
    try:
        content = await tools[call.name].run(call.arguments, env)
        return _Reply(content=content, failed=False, seconds=time() - started)
    except Exception as error:  # noqa: BLE001  raised again below, or told to the model
        failure = blamed(f"tool {call.name!r}", error)
    if isinstance(failure, AsyncRLError):
        raise failure
    content, where = f"{_ERROR}{error_text(failure)}", place_of(failure)
    return _Reply(content=content, failed=True, seconds=time() - started, where=where)
