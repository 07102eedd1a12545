"""What is said in which conversation, overheard from the renderer: a sampler sees tokens only.

A trajectory renders and samples in one task, so a conversation is known by its task. It begins with its prompt; another
attempt in the same task is another conversation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from asyncrl.errors import ConfigError
from asyncrl.rollout.renderer import ChatRenderer, ParsedTurn, TextRenderer
from asyncrl.rollout.tools import Tool
from asyncrl.types import IntArray, Message

__all__ = ["Conversation", "ListeningRenderer"]

_REMEMBERED = 64


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One conversation, as far as it came."""

    messages: list[Message]
    tools: Sequence[Tool]
    turns: int = 0
    """Of the model, begun."""
    rest: IntArray | None = None
    """What the model has still to say in its open turn; None between turns."""
    outcome: str = field(default="")
    """What a person reads of its end."""


class ListeningRenderer:
    """``renderer``, and an ear: ``current`` is the conversation of the task that asks."""

    def __init__(self, renderer: ChatRenderer | TextRenderer) -> None:
        self.real = renderer
        self.stop = renderer.stop
        self.stop_token_ids = renderer.stop_token_ids
        self._of_task: WeakKeyDictionary[asyncio.Task[Any], Conversation] = WeakKeyDictionary()
        self.conversations: deque[Conversation] = deque(maxlen=_REMEMBERED)
        """The last ones, in the order in which they began."""

    @property
    def current(self) -> Conversation:
        """Raises ``ConfigError`` if its prompt was rendered by somebody else."""
        try:
            return self._of_task[_task()]
        except KeyError:
            raise ConfigError(
                "a scripted model samples with its own renderer only: RolloutEngine(.., renderer=model.renderer)"
            ) from None

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        """The real prompt: a conversation begins."""
        conversation = Conversation(messages=list(messages), tools=tools)
        self._of_task[_task()] = conversation
        self.conversations.append(conversation)
        return await self.real.prompt(messages, tools)

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn_ids: IntArray, tools: Sequence[Tool]
    ) -> IntArray:
        """The real framing: the environment said something."""
        self.current.messages = [*before, *new]
        return await self.real.continuation(before, new, turn_ids, tools)

    async def shortened(self, messages: Sequence[Message], max_tokens: int) -> list[Message]:
        """The real one."""
        return await self.real.shortened(messages, max_tokens)

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """The real reading: the model's turn has ended."""
        parsed = await self.real.parse(turn_ids, tools)
        conversation = self.current
        conversation.messages.append(parsed.message)
        conversation.rest = None
        return parsed

    def text(self, ids: IntArray) -> str:
        """The real text."""
        return self.real.text(ids)


def _task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
