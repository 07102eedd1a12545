"""A scripted model: text and tool calls instead of tokens, for tests of environments.

It stands where a sampler stands, and everything else is real: the renderer and its chat template, tools, budgets, the
rollout engine. A turn becomes the tokens that a model of this template would sample, its calls in the template's own
notation and its end with the template's own token; that its calls are read back is checked.

Left out: the time that a model takes, which ``ScriptedSampler`` has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np

from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.events import Events, Notice
from asyncrl.rollout.announcement import tagged
from asyncrl.rollout.budget import Budget
from asyncrl.rollout.callvalues import call_message
from asyncrl.rollout.chattemplate import result_of, turn_of
from asyncrl.rollout.engine import RolloutEngine
from asyncrl.rollout.env import Env
from asyncrl.rollout.failures import Failures
from asyncrl.rollout.groupplan import FailedGroup
from asyncrl.rollout.renderer import ChatRenderer, TextRenderer, load_renderer
from asyncrl.rollout.tools import Tool
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing.bytetokenizer import ByteTokenizer
from asyncrl.testing.heard import Conversation, ListeningRenderer
from asyncrl.testing.script import Asked, Call, Script, ScriptEnded, checked_turn, shown_conversation, shown_turn
from asyncrl.testing.scripted import scripted_policy
from asyncrl.types import IntArray, Message, Row, Segment, StopReason, Trajectory, VersionSpan

__all__ = ["ScriptedModel"]


class ScriptedModel:
    """Says what a script says: ``ScriptedModel(["let me look", call("search", query="x"), "42"])``.

    ``script``: turns, each a text, a ``call``, or a list of both that is said in one turn; every conversation hears
    them from the beginning. Or a function from ``Asked`` to the next turn, None if there is none.
    ``tokenizer``: a folder, a name in the local cache, or a loaded tokenizer, whose chat template is used; or a
    renderer. None is a small one in memory, for any text, with tools.
    ``template_options``: variables of the chat template, such as ``enable_thinking``.

    One conversation is ``await model.play(MyEnv, row)``. For groups it is a sampler, with a renderer of its own::

        rl.RolloutEngine(scripted_policy(sampler=model), env=MyEnv, renderer=model.renderer)
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Any = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(script, str) or not (callable(script) or isinstance(script, Sequence)):
            allowed = "a list of turns, or a function that gives the next one"
            raise ConfigError.for_value("script", script, allowed)
        self._function: Callable[[Asked], Any] | None = script if callable(script) else None
        turns = () if callable(script) else script
        self._turns = [checked_turn(turn, place) for place, turn in enumerate(turns)]
        self._tokenizer = tokenizer
        self._template_options = dict(template_options or {})
        self._renderer: ListeningRenderer | None = None

    @property
    def renderer(self) -> ListeningRenderer:
        """What an engine with this model renders with. The first time a tokenizer that is a folder is loaded."""
        if self._renderer is None:
            self._renderer = ListeningRenderer(_load(self._tokenizer, self._template_options))
        return self._renderer

    @property
    def transcript(self) -> str:
        """What was said, for people: all conversations (the last 64), with an empty line between them."""
        conversations = self._renderer.conversations if self._renderer else ()
        return "\n\n".join(map(_transcript, conversations))

    async def play(
        self, env: Env | Callable[[], Env], row: Row, *, budget: Budget | None = None, seed: int = 0, whole: bool = True
    ) -> Trajectory:
        """Run one trajectory of ``row`` from ``reset`` to ``reward``, with ``close``, and return it.

        ``env``: an instance, a class, or a function that makes one. ``seed``: of the run, for ``traj.seed``.
        ``whole``: all turns of the script have to be asked for. Raises ``ScriptEnded`` if they are not, or if more are;
        what the environment raises is raised as it is, and nothing is tried again.
        """
        await anyio.to_thread.run_sync(lambda: self.renderer)
        engine = RolloutEngine(
            scripted_policy(sampler=self),
            env=env,
            budget=budget,
            seed=seed,
            renderer=self.renderer,
            failures=Failures(member_retries=0, group_rerolls=0),
        )
        events, notices = Events(), list[Notice]()
        events.subscribe(notices.append, kinds=(Notice,))  # type: ignore[arg-type]
        async with engine.opened(events) as session:
            await session.publish(0)
            group = await session.group(0, row, 1)
        if isinstance(group, FailedGroup):
            raise group.error
        for notice in notices:
            if notice.name == "environment_not_closed":
                raise EnvironmentFailure(f"close() of {notice.keys['environment']} failed: {notice.keys['error']}")
        [traj] = group.members_G
        self._end(traj, self.renderer.conversations[-1], whole=whole)
        return traj

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        """There is nothing to connect to."""
        yield

    async def sample(self, request: SegmentRequest) -> Segment:
        """Say the next turn of the script, or what is left of it. Every token has the log-probability -1."""
        conversation = self.renderer.current
        if conversation.rest is None:
            parts = self._next(conversation, request.trajectory_id)
            conversation.turns += 1
            conversation.rest = await self._written(parts, conversation.tools)
        rest, most = conversation.rest, request.max_new_tokens
        tokens, conversation.rest = rest[:most], rest[most:]
        span = VersionSpan(version=request.version, start=0, end=len(tokens))
        return Segment(
            tokens=tokens,
            logprobs=np.full(len(tokens), -1.0, dtype=np.float32),
            versions=(span,) if len(tokens) else (),
            stop=StopReason.LENGTH if len(conversation.rest) else StopReason.STOP,
            server="scripted",
        )

    def _next(self, conversation: Conversation, trajectory: str) -> Sequence[str | Call]:
        """The next turn. Raises ``ScriptEnded``."""
        said = conversation.turns
        if self._function is None:
            if said < len(self._turns):
                return self._turns[said]
        else:
            member = int(trajectory.rpartition("-")[2])
            asked = Asked(messages=tuple(conversation.messages), turn=said, trajectory=trajectory, member=member)
            turn = self._function(asked)
            if turn is not None:
                return checked_turn(turn, said)
        raise ScriptEnded(
            f"the environment asks for turn {said + 1}, but the script {self._shown()}. The conversation so far:\n"
            f"{_transcript(conversation)}"
        )

    async def _written(self, parts: Sequence[str | Call], tools: Sequence[Tool]) -> IntArray:
        """The tokens of a turn. Raises ``ConfigError`` if its calls would not be read back."""
        renderer = self.renderer.real
        ids = np.asarray(_write(renderer, parts, tools), dtype=np.int32)
        wanted = Counter(part.name for part in parts if isinstance(part, Call))
        if wanted:
            read = await renderer.parse(ids, tools)
            if wanted - Counter(found.name for found in read.tool_calls):
                raise ConfigError(
                    f"the turn {shown_turn(parts)} does not survive the chat template of this tokenizer, whose "
                    f"notation of calls is not known: it was written as {renderer.text(ids)!r}"
                )
        return ids

    def _end(self, traj: Trajectory, conversation: Conversation, *, whole: bool) -> None:
        """Note how the conversation ended. Raises ``ScriptEnded`` if some of the script was not said."""
        how = f"it was truncated by its {traj.truncated} budget" if traj.truncated else "the environment ended it"
        cut = f", truncated ({traj.truncated})" if traj.truncated else ""
        conversation.outcome = f"reward {traj.reward}{cut}"
        left = self._turns[conversation.turns :]
        if whole and left:
            raise ScriptEnded(
                f"the conversation ended with turn {conversation.turns} ({how}), but the script {self._shown()}, and "
                f"{len(left)} were not asked for:\n{_transcript(conversation)}"
            )

    def _shown(self) -> str:
        if self._function is not None:
            return f"({getattr(self._function, '__qualname__', self._function)}) gave None"
        return f"has {len(self._turns)}: {', '.join(map(shown_turn, self._turns))}"


def _transcript(conversation: Conversation) -> str:
    said = shown_conversation(conversation.messages)
    return f"{said}\n{conversation.outcome}" if conversation.outcome else said


def _load(tokenizer: Any, template_options: Mapping[str, Any]) -> ChatRenderer | TextRenderer:
    if isinstance(tokenizer, ChatRenderer | TextRenderer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        return load_renderer(Path(tokenizer).expanduser(), "auto", template_options=template_options)
    tokenizer = tokenizer or ByteTokenizer()
    if tokenizer.chat_template:
        return ChatRenderer(tokenizer, template_options=template_options)
    return TextRenderer(tokenizer)


def _write(renderer: ChatRenderer | TextRenderer, parts: Sequence[str | Call], tools: Sequence[Tool]) -> list[int]:
    """A turn as a model samples it, with the token that ends it."""
    pieces = list(_pieces(renderer, parts, tools))
    if isinstance(renderer, ChatRenderer) and renderer.template.thinks and not any("</think>" in p for p in pieces):
        pieces.insert(0, "\n</think>\n\n")  # the template has opened reasoning, in which nothing is called
    ids = [id for piece in pieces for id in renderer.control.encode(piece)]
    end = _end_of(renderer, [part for part in parts if isinstance(part, Call)], tools)
    return ids if end is None else [*ids, end]


def _pieces(renderer: ChatRenderer | TextRenderer, parts: Sequence[str | Call], tools: Sequence[Tool]) -> Iterator[str]:
    """The text of each part; calls that follow each other are written together, as templates do."""
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if is_text:
            yield from (str(renderer.control.shield(text, model_turn=True)) for text in run)
            continue
        turn = _calling(renderer, [part for part in run if isinstance(part, Call)])
        try:
            text = renderer.template.calls(turn, tools) if isinstance(renderer, ChatRenderer) else ""
        except ConfigError:
            text = ""
        yield text if all(call["function"]["name"] in text for call in turn["tool_calls"]) else tagged(turn)


def _calling(renderer: ChatRenderer | TextRenderer, calls: Sequence[Call]) -> Message:
    """A message with these calls, in whose values nothing is a control token."""
    shielded = [
        call_message(call.name, renderer.control.shield(dict(call.arguments)), f"call{index:05}")
        for index, call in enumerate(calls)
    ]
    return turn_of(shielded)


def _end_of(renderer: ChatRenderer | TextRenderer, calls: Sequence[Call], tools: Sequence[Tool]) -> int | None:
    """The token that ends a turn with these calls; None if only stop strings do."""
    ends = renderer.stop_token_ids
    if not ends or not calls or not isinstance(renderer, ChatRenderer):
        return ends[0] if ends else None
    turn = _calling(renderer, calls)
    try:
        after = renderer.control.encode(renderer.template.after(turn, [result_of(turn, "")], tools))
    except ConfigError:
        return ends[0]
    return next((id for id in after if id in ends), ends[0])
