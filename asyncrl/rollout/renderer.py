"""Renderers: messages to tokens and back, append only.

Sampled ids are never decoded and encoded again. The prompt is tokenised once; after a turn only the text that the
environment adds is, as framing that follows the sampled ids exactly, at a cost in proportion to the new text. Messages
are a view: a chat template that would drop reasoning from earlier turns does not change what stands there.

What takes long, by what it took before, is tokenised and read in a thread. Left out: images, and any protection against
control tokens in what tools return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import anyio
import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.rollout.toolcalls import ParsedTurn, parse_hermes, parse_with_template
from asyncrl.rollout.tools import Tool, elide
from asyncrl.types import IntArray, Message

__all__ = ["ChatRenderer", "ParsedTurn", "Renderer", "TextRenderer", "load_renderer"]

T = TypeVar("T")
Tokenizer: TypeAlias = Any
"""A transformers tokenizer, whose methods are annotated too loosely to be of use."""
_INLINE_S = 0.003
# The way to a thread and back is about 0.1 ms; what holds the loop for longer than this holds it for everybody.
_THREADS = 2
# Tokenising is pure computation: more threads would take the cores from the event loop.
_FEW = 64
# Characters or tokens; for fewer than these, what is constant counts for more than their number.
_SENTINEL = "asyncrl:turn"
_ASK: Message = {"role": "user", "content": "a"}
_TURN: Message = {"role": "assistant", "content": _SENTINEL}


class Renderer(Protocol):
    """Turns messages into tokens. Real: ``ChatRenderer``, ``TextRenderer``."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn."""
        ...

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        """(T,) the opening of a conversation, up to where the model begins."""
        ...

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn_ids: IntArray, tools: Sequence[Tool]
    ) -> IntArray:
        """(T,) framing that follows ``turn_ids``: a missing terminator, the ``new`` messages, the next turn's opening.

        ``before`` ends with the turn's message, for a renderer that has to look back; the two here need not.
        ``turn_ids`` are the turn as sampled; they are looked at, not repeated.
        """
        ...

    async def shortened(self, messages: Sequence[Message], max_tokens: int) -> list[Message]:
        """The same messages, tool results of more than ``max_tokens`` without their middle."""
        ...

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Read a sampled turn. Never raises because of what the model wrote."""
        ...


class _OffLoop:
    """Computes on the event loop what will take less than ``_INLINE_S``, and in a thread what may take longer.

    The time is in proportion to a size (characters, tokens), at the rate that was seen; the first goes to a thread.
    """

    def __init__(self, threads: anyio.CapacityLimiter) -> None:
        self._threads = threads
        self._seconds_per_unit: float | None = None

    async def __call__(self, size: int, compute: Callable[[], T]) -> T:
        """The result of ``compute``."""
        rate = self._seconds_per_unit
        if rate is not None and size * rate < _INLINE_S:
            started = time.perf_counter()
            result = compute()
            self._learn(size, time.perf_counter() - started)
            return result
        result, seconds = await anyio.to_thread.run_sync(_timed, compute, limiter=self._threads, abandon_on_cancel=True)
        self._learn(size, seconds)
        return result

    def _learn(self, size: int, seconds: float) -> None:
        """Believe a slow one at once and a quick one by and by."""
        seen, rate = seconds / max(size, _FEW), self._seconds_per_unit
        self._seconds_per_unit = seen if rate is None or seen > rate else 0.9 * rate + 0.1 * seen


def _timed(compute: Callable[[], T]) -> tuple[T, float]:
    # The thread's own time: waiting for the interpreter is not the computation's.
    started = time.thread_time()
    return compute(), time.thread_time() - started


class _TokenizingRenderer:
    """What both renderers share: encoding, decoding, and doing it off the event loop."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...], stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.stop = tuple(stop)
        threads = anyio.CapacityLimiter(_THREADS)
        self._writing = _OffLoop(threads)
        self._reading = _OffLoop(threads)

    async def shortened(self, messages: Sequence[Message], max_tokens: int) -> list[Message]:
        """See ``Renderer``."""

        def shorten(message: Message) -> Message:
            content = message.get("content")
            if message["role"] != "tool" or not isinstance(content, str):
                return message
            return message | {"content": elide(content, max_tokens, self.tokenizer)}

        return await self._off_loop(messages, lambda: [shorten(message) for message in messages])

    async def _off_loop(self, messages: Sequence[Message], compute: Callable[[], T]) -> T:
        return await self._writing(sum(len(message.get("content") or "") for message in messages), compute)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _text(self, turn_ids: IntArray) -> str:
        """The turn as text, without what ended it."""
        ids = turn_ids[:-1] if len(turn_ids) and turn_ids[-1] in self.stop_token_ids else turn_ids
        text = str(self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))
        for stop in self.stop:
            text = text.partition(stop)[0]
        return text


class TextRenderer(_TokenizingRenderer):
    """Concatenates contents: for base models, and for prompts that spell out their own form.

    ``stop`` are strings that end a turn, as the end-of-text token does. Tools are not announced, the environment's text
    has to do that; calls in Hermes form are recognised.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        super().__init__(tokenizer, _end_of_text(tokenizer), stop)
        specials: list[int] = tokenizer.encode("")
        # Models that want a beginning-of-text token want it once, in front.
        self._opening = specials[:1] if specials and specials[0] == tokenizer.bos_token_id else []

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        """See ``Renderer``."""
        text = _joined(messages)
        return _ids(await self._off_loop(messages, lambda: self._opening + self._encode(text)))

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn_ids: IntArray, tools: Sequence[Tool]
    ) -> IntArray:
        """See ``Renderer``. Text has no terminator, so none is added."""
        text = _joined(new)
        return _ids(await self._off_loop(new, lambda: self._encode(text)))

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """See ``Renderer``."""
        return await self._reading(len(turn_ids), lambda: parse_hermes(self._text(turn_ids)))


class ChatRenderer(_TokenizingRenderer):
    """Renders with the tokenizer's chat template.

    What follows a turn is found by rendering a small conversation whose model message is a mark, and taking the text
    behind the mark: its terminator, the new messages, the opening of the next turn. This is right if that text does not
    depend on earlier turns, and if a special token ends each model message; otherwise the constructor raises
    ``ConfigError``. ``stop`` are strings that end a turn beside that token.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; use the text renderer for this model")
        self._terminator = _terminator(tokenizer)
        ends = tuple(dict.fromkeys((self._terminator, *_end_of_text(tokenizer))))
        super().__init__(tokenizer, ends, stop)
        self._short_prompt = _render(tokenizer, [_ASK], (), generate=True)

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        """See ``Renderer``."""

        def render() -> list[int]:
            return self._encode(_render(self.tokenizer, messages, tools, generate=True))

        return _ids(await self._off_loop(messages, render))

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn_ids: IntArray, tools: Sequence[Tool]
    ) -> IntArray:
        """See ``Renderer``."""

        def render() -> list[int]:
            ids = self._encode(_after_mark(self.tokenizer, [_ASK, _TURN, *new], tools, generate=True))
            # Encoded with the terminator even if it is there already, so that the rest is split as after a terminator.
            return ids[ids.index(self._terminator) + 1 :] if ended else ids

        ended = len(turn_ids) > 0 and turn_ids[-1] == self._terminator
        return _ids(await self._off_loop(new, render))

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """See ``Renderer``. Uses the tokenizer's own response template if it has one."""

        def read() -> ParsedTurn:
            text = self._text(turn_ids)
            if getattr(self.tokenizer, "response_template", None) is None:
                return parse_hermes(text)
            schemas = [tool.schema for tool in tools]
            return parse_with_template(self.tokenizer, text, prefix=self._short_prompt, tools=schemas)

        return await self._reading(len(turn_ids), read)


def load_renderer(model_dir: Path, kind: Literal["chat", "text"] = "chat", *, stop: Sequence[str] = ()) -> Renderer:
    """Make the renderer of the tokenizer in ``model_dir``. Reads files, so call it in a thread."""
    if kind not in ("chat", "text"):
        raise ConfigError.for_value("renderer", kind, "'chat' or 'text'")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    return ChatRenderer(tokenizer, stop=stop) if kind == "chat" else TextRenderer(tokenizer, stop=stop)


def _terminator(tokenizer: Tokenizer) -> int:
    """The special token that ends a model message; raises ``ConfigError`` if the template cannot be continued."""
    last = _after_mark(tokenizer, [_ASK, _TURN], (), generate=False)
    then = _after_mark(tokenizer, [_ASK, _TURN, _ASK], (), generate=True)
    earlier = [_ASK, {"role": "assistant", "content": "b"}]
    if _after_mark(tokenizer, [*earlier, _ASK, _TURN, _ASK], (), generate=True) != then:
        raise ConfigError(
            "the chat template writes text after a turn that depends on earlier turns; it cannot be appended"
        )
    added = tokenizer.added_tokens_decoder
    specials = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    ends: list[int | None] = [
        next((id for id in tokenizer.encode(text, add_special_tokens=False) if id in specials), None)
        for text in (last, then)
    ]
    if ends[0] is None or ends[0] != ends[1]:
        raise ConfigError(
            f"the chat template ends a model message with {last!r}, and with {then!r} if another follows, but must end "
            "it with the same special token"
        )
    return ends[0]


def _after_mark(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool) -> str:
    text = _render(tokenizer, messages, tools, generate=generate)
    _, mark, after = text.partition(_SENTINEL)
    if not mark:
        raise ConfigError(f"the chat template does not write a model message as it is: {text!r}")
    return after


def _render(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool) -> str:
    from jinja2 import TemplateError

    schemas = [tool.schema for tool in tools] or None
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tools=schemas, add_generation_prompt=generate, tokenize=False)
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(f"the chat template refuses messages of the roles {roles}: {error}") from error


def _end_of_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


def _ids(ids: Sequence[int]) -> IntArray:
    return np.asarray(ids, dtype=np.int32)
