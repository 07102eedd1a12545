"""The rehearsal: scripted conversations through a user's environment, before any model is loaded.

The engine's own coroutines play them, with the real renderer; the model is a script. One conversation calls every tool
with made-up arguments, others give an empty answer, run out of budget, or are cut off and brought back. Each call of
user code has a deadline. What goes wrong becomes a finding, and what does not depend on it goes on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from asyncrl.errors import RolloutTimeout
from asyncrl.events import Events
from asyncrl.plain import copied, shown
from asyncrl.recipe.findings import Findings
from asyncrl.rollout.border import checked_messages, place
from asyncrl.rollout.budget import Budget
from asyncrl.rollout.calls import UserCalls
from asyncrl.rollout.env import Env, EnvFactory
from asyncrl.rollout.failures import FailureBudget, Failures
from asyncrl.rollout.progress import Activities
from asyncrl.rollout.tools import Tool, example_arguments
from asyncrl.rollout.trajectory import RolloutContext, SamplingSettings, converse, grade, restored
from asyncrl.sampling.base import ModelRef
from asyncrl.scheduling.slots import OrderedSlots
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.testing.script import Asked, Turn, call, shown_conversation
from asyncrl.testing.scriptedmodel import ScriptedModel
from asyncrl.types import Message, Row, Trajectory

__all__ = ["ANSWER", "Rehearsal", "spells"]

ANSWER = "42"
"""What the scripted model answers: for most environments a wrong answer in a usual form."""
_GRACE = 1.25
# Deadlines until a call is interrupted that could not be cancelled.
_PLENTY = 10**9
_MISTAKES = (TypeError, AttributeError, NameError, ImportError, NotImplementedError, RecursionError)
# No argument of the right type is the reason for these.
_SHOWN = 120
_TODO = {
    "environment": "each trajectory makes one, with the keys of [env]: make it work with nothing else",
    "reset": "reset(row) must return the first messages, such as [{'role': 'user', 'content': ..}]",
    "on_turn": "on_turn(traj) must answer each turn of the model with messages, or end the conversation with None",
    "reward": "reward(traj, row) must return a number for every answer, also for an empty or odd one",
    "on_truncated": "on_truncated(traj, row, cause) must return a number for every conversation that was cut off",
    "snapshot": "snapshot(traj) must return what JSON has, from which restore(traj, state) brings it back",
    "restore": "restore(traj, state) must bring a fresh environment to where snapshot(traj) was taken, without reset",
    "close": "close() is called once for each trajectory, also after an error: it must not need a reset before",
}


class _Pause(BaseException):
    """Ends a conversation as the end of a process would."""


class _Calls(UserCalls):
    """Calls of user code that remember which was the last one, and what each returned."""

    __slots__ = ("hook", "results", "seconds", "where")

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.seconds = timeout
        self.hook = "environment"
        self.where = ""
        self.results: dict[str, object] = {}

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(getattr(function, "__name__", "environment"), function)
        with _interrupted_after(_GRACE * self.seconds, self.hook):
            result = await super().__call__(function, *args)
        self.results[self.hook] = result
        return result

    def begin(self, hook: str, function: object) -> None:
        """``hook`` is called now."""
        self.hook, self.where = hook, place(function)


@contextmanager
def _interrupted_after(seconds: float, hook: str) -> Iterator[None]:
    """Raise ``RolloutTimeout`` in the block if it holds the event loop, for then no deadline can end it."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(*_: object) -> None:
        raise RolloutTimeout(f"{hook} has held the event loop for {seconds:g} s, in a call that waits without await")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@dataclass(slots=True, kw_only=True)
class _Ears:
    """What the tools of the environments were called with, and what came of it."""

    outcomes: dict[str, object] = field(default_factory=dict)
    """Tool -> its last result, or what it raised."""
    running: dict[str, Tool] = field(default_factory=dict)
    """Those that have not ended."""

    def overhear(self, env: Env) -> None:
        """Listen to the tools of ``env``."""
        with suppress(AttributeError):  # they are computed; then only what the model reads of them is known
            env.tools = tuple(replace(tool, function=self._heard(tool)) for tool in env.tools)

    def _heard(self, tool: Tool) -> Callable[..., Any]:
        @wraps(tool.function)
        def call(*args: Any, **arguments: Any) -> Any:
            with self._listening(tool):
                self.outcomes[tool.name] = tool.function(*args, **arguments)
            return self.outcomes[tool.name]

        @wraps(tool.function)
        async def awaited(*args: Any, **arguments: Any) -> Any:
            with self._listening(tool):
                made: Any = tool.function(*args, **arguments)
                self.outcomes[tool.name] = await made
            return self.outcomes[tool.name]

        return awaited if tool.asynchronous else call

    @contextmanager
    def _listening(self, tool: Tool) -> Iterator[None]:
        self.running[tool.name] = tool
        try:
            yield
        except Exception as error:
            self.outcomes[tool.name] = error
            del self.running[tool.name]
            raise
        del self.running[tool.name]  # but not of one that was cancelled


class Rehearsal:
    """Plays the conversations of one environment. Enter it as a block, in which each user call has ``timeout_s``."""

    def __init__(self, factory: EnvFactory, row: Row, renderer: Any, findings: Findings, *, timeout_s: float) -> None:
        self._factory = factory
        self._row = row
        self._real = renderer if spells(renderer) else None
        # With a toy of few words a made-up call cannot be written; the one in memory then stands in for it.
        self._findings = findings
        self._calls = _Calls(timeout_s)
        self._ears = _Ears()

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.__exit__(*error)

    async def opening(self) -> tuple[Env, list[Message]] | None:
        """An environment that was reset, and closed, with its first messages; None if that went wrong."""
        row = copied(self._row)
        env = await self._made()
        if env is None:
            return None
        try:
            messages = checked_messages(await self._calls(env.reset, row), env.reset, least=1)
        except Exception as error:  # noqa: BLE001  whatever user code raises is a finding
            self._report(error)
            return None
        finally:
            await self._close(env)
        if _differ(row, self._row):
            text = "reset changes the row; each trajectory has its own copy, so that no other one sees that"
            self._findings.warn("reset", text)
        self._findings.ok("reset", f"{len(messages)} message{'s' * (len(messages) != 1)} for row 0: {shown(self._row)}")
        return env, messages

    async def run(self, env: Env) -> None:
        """All conversations; ``env`` is one of the same kind, whose methods are looked at only."""
        usual = await self._tools(list(env.tools))
        empty = await self._play([""])
        self._rewards(usual, empty)
        if type(env).on_truncated is not Env.on_truncated:
            cut = await self._play([ANSWER], generated_tokens=1)
            if cut is not None:
                self._findings.ok("on_truncated", f"{cut.reward:g} for an answer that was cut off")
        if env.recovery != "drop" and usual is not None:
            await self._recover(env, max(0, usual.turns - 1))
        if self._factory.owned and type(env).close is not Env.close:
            self._findings.ok("close", "closed after each conversation")

    async def _tools(self, tools: list[Tool]) -> Trajectory | None:
        """The conversation in which every tool is called: more than one if the environment ends it before the last."""
        played, pending, broke = None, tools, False
        while True:
            script: list[Turn] = [call(tool.name, **example_arguments(tool)) for tool in pending]
            traj = await self._play([*script, ANSWER])
            played, broke = traj or played, broke or traj is None
            pending = [tool for tool in pending[1:] if tool.name not in self._ears.outcomes]
            if not pending:
                break
        for tool in tools:
            if tool.name in self._ears.outcomes or not broke:
                self._tell_tool(tool)
        return played

    def _tell_tool(self, tool: Tool) -> None:
        part, made_up = f"tool {tool.name}", call(tool.name, **example_arguments(tool))
        outcome = self._ears.outcomes.get(tool.name)
        if isinstance(outcome, Exception):
            mistake = isinstance(outcome, _MISTAKES)
            todo = f"the call was {made_up}; the model reads the error as the tool's result"
            self._findings.error(part, outcome, todo=todo, harmless=not mistake)
        elif tool.name not in self._ears.outcomes:
            text = f"the call {made_up} did not reach it ({place(tool.function)})"
            todo = "on_turn has to run the calls of a turn: return await super().on_turn(traj) does"
            self._findings.warn(part, text, todo=todo)
        elif isinstance(outcome, str):
            self._findings.ok(part, f"{made_up} gave {shown(outcome)}")

    def _rewards(self, usual: Trajectory | None, empty: Trajectory | None) -> None:
        """Compare what an empty answer and a usual one are worth."""
        given = self._calls.results.get("reward")
        if given is not None and type(given) not in (float, int):
            text = f"it returned {shown(given)} ({type(given).__name__}), which counts as {float(given):g}"  # type: ignore[arg-type]
            self._findings.warn("reward", text, todo="return float(..), so that nobody has to guess")
        if usual is None or empty is None:
            return
        said = f"{ANSWER!r} after {usual.turns - 1} other turns" if usual.turns > 1 else repr(ANSWER)
        if usual.reward == empty.reward:
            text = f"{empty.reward:g} for an empty answer and for {said} alike"
            todo = "fine if both are equally wrong; where rewards never differ nothing can be learned"
            self._findings.warn("reward", text, todo=todo)
        else:
            self._findings.ok("reward", f"{usual.reward:g} for {said}, {empty.reward:g} for an empty answer")

    async def _play(self, turns: Sequence[Turn], *, generated_tokens: int = _PLENTY) -> Trajectory | None:
        """One conversation in which the model says ``turns``, to its reward; None if something went wrong."""
        env = await self._made()
        if env is None:
            return None
        traj = self._trajectory()
        context = self._context(turns, generated_tokens=generated_tokens)
        try:
            await converse(traj, env, context, allow=_all)
            if traj.truncated is not None and generated_tokens == _PLENTY:
                traj.truncated = None  # it would have gone on for longer than the script
            await grade(traj, env, context)
            return traj
        except Exception as error:  # noqa: BLE001  whatever user code raises is a finding
            self._report(error, traj)
            return None
        finally:
            await self._close(env)

    async def _recover(self, env: Env, turns: int) -> None:
        """Cut a conversation off after so many turns, and go on with a fresh environment, as a resumed run does."""
        tools = [call(tool.name, **example_arguments(tool)) for tool in env.tools]
        script: list[Turn] = [*tools, ANSWER]
        traj, context = self._trajectory(), self._context(script, pause_at=turns)
        for goes_on in (False, True):
            made = await self._made()
            if made is None:
                return
            try:
                if goes_on:
                    await restored(traj, made, context)
                await converse(traj, made, context, allow=_all)
            except _Pause:
                continue
            except Exception as error:  # noqa: BLE001  whatever user code raises is a finding
                self._report(error, traj)
                return
            finally:
                await self._close(made)
        state = f", with {len(traj.env_state)} bytes of JSON from snapshot" if traj.env_state is not None else ""
        self._findings.ok("recovery", f"{env.recovery}: a fresh environment goes on after turn {turns}{state}")

    async def _made(self) -> Env | None:
        """A new environment, on the event loop, as a run makes it."""
        self._calls.begin("environment", self._factory.create)
        try:
            with _interrupted_after(_GRACE * self._calls.seconds, "__init__"):
                env = self._factory.create()
        except Exception as error:  # noqa: BLE001  whatever user code raises is a finding
            self._report(error)
            return None
        self._ears.overhear(env)
        return env

    async def _close(self, env: Env) -> None:
        if not self._factory.owned:
            return
        try:
            await self._calls(env.close)
        except Exception as error:  # noqa: BLE001  whatever user code raises is a finding
            self._report(error)

    def _report(self, error: Exception, traj: Trajectory | None = None) -> None:
        hook, where = self._calls.hook, self._calls.where
        todo = _TODO.get(hook, "")
        if isinstance(error, RolloutTimeout):
            tool = next(iter(self._ears.running.values()), None)
            if tool is not None:
                hook, where = f"tool {tool.name}", place(tool.function)
                error = RolloutTimeout(f"it has not ended after {self._calls.seconds:g} s").with_traceback(None)
                self._ears.running.clear()
            if where not in str(error):
                error = RolloutTimeout(f"{error}: {where}").with_traceback(error.__traceback__)
            todo = "give what it waits for a deadline of its own; --timeout lets each call take longer"
        elif tool_name := next((name for name in self._ears.outcomes if f"tool {name!r}" in str(error)), None):
            hook, todo = f"tool {tool_name}", "a tool must return text: return str(..)"
        elif hook == "on_turn" and traj is not None and traj.messages:
            said = shown_conversation(traj.messages[-1:])
            todo = f"{todo}; before it: {said[:_SHOWN]}"
        elif hook == "reset":
            todo = f"{todo}; the row was {shown(self._row)}"
        self._findings.error(hook, error, todo=todo)

    def _trajectory(self) -> Trajectory:
        return Trajectory(id="check-0", group=0, member=0, row=copied(self._row), seed=0)

    def _context(
        self, turns: Sequence[Turn], *, generated_tokens: int = _PLENTY, pause_at: int | None = None
    ) -> RolloutContext:
        """What a run gives its trajectories, with a model that says ``turns`` and then the last one again.

        ``pause_at``: the turn before which the conversation is cut off, once.
        """
        pauses = [pause_at]

        def say(asked: Asked) -> Turn:
            if asked.turn in pauses:
                pauses.clear()
                raise _Pause
            return turns[min(asked.turn, len(turns) - 1)]

        model = ScriptedModel(say, tokenizer=self._real)
        return RolloutContext(
            sampler=model,
            renderer=model.renderer,
            budget=Budget(max_turns=len(turns) + 1, max_generated_tokens=generated_tokens, max_context_tokens=_PLENTY),
            settings=SamplingSettings(),
            requests=OrderedSlots(1),
            versions=PolicyClock(0),
            model_ref=lambda version, anchor: ModelRef(adapter=None, extra_key=""),
            pin=lambda version: None,
            unpin=lambda version: None,
            events=Events(),
            failures=FailureBudget(Failures()),
            activities=Activities(),
            calls=self._calls,
            keeps_env_state=True,
        )


def _all(traj: Trajectory, wanted: int) -> int:
    return wanted


def _differ(one: object, other: object) -> bool:
    try:
        return bool(one != other)
    except Exception:  # noqa: BLE001  values of anybody's, such as arrays, may not compare
        return False


def spells(renderer: Any) -> bool:
    """False if its tokenizer has no tokens for letters and digits, as a toy of few words."""
    text = "abcdefghijklmnopqrstuvwxyz_0123456789"
    return text in str(renderer.tokenizer.decode(renderer.encode(text)))
