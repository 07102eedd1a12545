"""Renderers: messages to tokens and back, append only.

Sampled ids are never decoded and encoded again. The prompt is tokenised once; after a turn only the text that the
environment adds is, as framing that follows the sampled ids exactly, at a cost in proportion to the new text. Messages
are a view: a chat template that would drop reasoning from earlier turns does not change what stands there.

What users, rows and tools write never becomes a control token. What takes long, by what it took before, is tokenised
and read in a thread. Left out: images.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import anyio
import numpy as np

from asyncrl.concurrency.outside import waiting_outside
from asyncrl.errors import ConfigError, require_choice
from asyncrl.events import Events, Notice
from asyncrl.rollout.announcement import AnnounceTools, announced, tagged
from asyncrl.rollout.chattemplate import ChatTemplate, example_call, text_of
from asyncrl.rollout.controltokens import ControlTokens, Tokenizer
from asyncrl.rollout.env import EnvFactory
from asyncrl.rollout.notations import TAGS
from asyncrl.rollout.roundtrip import UNANNOUNCED, Problem, round_trip
from asyncrl.rollout.toolcalls import ParsedTurn, parse_calls, parse_hermes, parse_with_template
from asyncrl.rollout.tools import Tool, elide
from asyncrl.types import IntArray, Message

__all__ = ["ChatRenderer", "ParsedTurn", "Renderer", "TextRenderer", "load_renderer", "open_renderer"]

T = TypeVar("T")
_INLINE_S = 0.003
# The way to a thread and back is about 0.1 ms; what holds the loop for longer than this holds it for everybody.
_THREADS = 2
# Tokenising is pure computation: more threads would take the cores from the event loop.
_FEW = 64
# Characters or tokens; for fewer than these, what is constant counts for more than their number.


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

        ``before`` ends with the turn's message as ``parse`` gave it, its calls included: what a template writes may
        depend on them. ``turn_ids`` are the turn as sampled; they are looked at, not repeated.
        """
        ...

    async def shortened(self, messages: Sequence[Message], max_tokens: int) -> list[Message]:
        """The same messages, tool results of more than ``max_tokens`` without their middle."""
        ...

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Read a sampled turn, complete or not. Never raises because of what the model wrote."""
        ...

    def text(self, ids: IntArray) -> str:
        """What sampled ``ids`` say, where stop strings are looked for; asked only if there are any."""
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
        with waiting_outside():
            result, seconds = await anyio.to_thread.run_sync(
                _timed, compute, limiter=self._threads, abandon_on_cancel=True
            )
        self._learn(size, seconds)
        return result

    def _learn(self, size: int, seconds: float) -> None:
        """Take over a slower rate at once, and a quicker one bit by bit."""
        seen, rate = seconds / max(size, _FEW), self._seconds_per_unit
        self._seconds_per_unit = seen if rate is None or seen > rate else 0.9 * rate + 0.1 * seen


def _timed(compute: Callable[[], T]) -> tuple[T, float]:
    # The thread's own time: waiting for the interpreter is not the computation's.
    started = time.thread_time()
    return compute(), time.thread_time() - started


class _TokenizingRenderer:
    """What both renderers share: encoding, decoding, and doing it off the event loop."""

    def __init__(self, tokenizer: Tokenizer, control: ControlTokens, ends: Sequence[int], stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.control = control
        self.stop_token_ids = tuple(ends)
        self.stop = tuple(stop)
        threads = anyio.CapacityLimiter(_THREADS)
        self._writing = _OffLoop(threads)
        self._reading = _OffLoop(threads)

    async def shortened(self, messages: Sequence[Message], max_tokens: int) -> list[Message]:
        """The same messages, tool results of more than ``max_tokens`` without their middle; parts become one text."""

        def shorten(message: Message) -> Message:
            content = message.get("content")
            if message.get("role") != "tool" or not content:
                return message
            text = text_of(content)
            short = elide(text, max_tokens, self)
            return message if short == text else message | {"content": short}

        return await self._off_loop(messages, lambda: [shorten(message) for message in messages])

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a text as content: none of them is a control token."""
        return self.control.encode(self.control.shield(text))

    def text(self, ids: IntArray) -> str:
        """What sampled ``ids`` say."""
        return str(self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    async def _off_loop(self, messages: Sequence[Message], compute: Callable[[], T]) -> T:
        return await self._writing(sum(_size(message.get("content")) for message in messages), compute)

    def _text(self, turn_ids: IntArray) -> str:
        """The turn as text, without what ended it."""
        ids = turn_ids[:-1] if len(turn_ids) and turn_ids[-1] in self.stop_token_ids else turn_ids
        text = str(self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))
        for stop in self.stop:
            text = text.partition(stop)[0]
        return text


class TextRenderer(_TokenizingRenderer):
    """Concatenates contents: for base models, and for prompts that spell out their own form in plain text.

    ``stop`` are strings that end a turn, as the end-of-text token and the tokens ``ends`` do. ``announce_tools``: with
    "text" a text in front describes the tools, else the environment's has to; calls in Hermes form are recognised.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        ends: Sequence[int] = (),
        announce_tools: AnnounceTools = "template",
    ) -> None:
        self._announce_tools = announce_tools
        super().__init__(tokenizer, ControlTokens(tokenizer), _known_ends(tokenizer, ends), stop)
        specials: list[int] = tokenizer.encode("")
        # Models that want a beginning-of-text token want it once, in front, also where a prompt spells it out.
        self._opening = specials[:1] if specials and specials[0] == tokenizer.bos_token_id else []
        self._bos = str(tokenizer.bos_token or "") if self._opening else ""

    def check(self, tools: Sequence[Tool]) -> list[Problem]:
        """A problem if there are tools and nobody has said who is to tell the model of them."""
        if not tools or self._announce_tools != "template":
            return []
        names = tuple(tool.name for tool in tools)
        reason = f"the text renderer has no template that tells the model of them: {UNANNOUNCED}"
        return [Problem(name="tools_not_announced", tools=names, reason=reason, fatal=True)]

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        """(T,) the contents as tokens, behind the model's beginning-of-text token."""
        text = self._announcement(tools) + _joined(messages).removeprefix(self._bos)
        return _ids(await self._off_loop(messages, lambda: self._opening + self.encode(text)))

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn_ids: IntArray, tools: Sequence[Tool]
    ) -> IntArray:
        """The contents of ``new`` as tokens. Text has no terminator, so none is added."""
        text = _joined(new)
        return _ids(await self._off_loop(new, lambda: self.encode(text)))

    def written(
        self, new: Sequence[Message], tools: Sequence[Tool], *, turn: Message | None = None, generate: bool = True
    ) -> str:
        """The text of a prompt, or of what follows ``turn``, with marks where it is encoded in pieces."""
        return str(self.control.shield((self._announcement(tools) if turn is None else "") + _joined(new)))

    def _announcement(self, tools: Sequence[Tool]) -> str:
        if self._announce_tools != "text" or not tools:
            return ""
        return announced([tool.schema["function"] for tool in tools], tagged(example_call(tools[0]))) + "\n\n"

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Read a sampled turn; calls in Hermes form."""
        return await self._reading(len(turn_ids), lambda: parse_hermes(self._text(turn_ids)))


class ChatRenderer(_TokenizingRenderer):
    """Renders with the tokenizer's chat template; see ``ChatTemplate`` for what it must be like.

    ``stop`` are strings that end a turn beside the template's terminator, the end-of-text token and the tokens
    ``ends``. ``template_options`` are variables of the template, such as ``enable_thinking``. ``announce_tools`` says
    who tells the model of its tools.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        ends: Sequence[int] = (),
        template_options: Mapping[str, Any] | None = None,
        announce_tools: AnnounceTools = "template",
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; use the text renderer for this model")
        control = ControlTokens(tokenizer)
        known = _known_ends(tokenizer, ends)
        how: dict[str, Any] = {"options": template_options, "announce_tools": announce_tools}
        self.template = ChatTemplate(tokenizer, control, ends=known, **how)
        super().__init__(tokenizer, control, self.template.ends, stop)
        self._own_reader = getattr(tokenizer, "response_template", None) is not None

    def check(self, tools: Sequence[Tool]) -> list[Problem]:
        """Take one conversation with every tool through the whole round trip; see ``round_trip``. Quick, no thread."""
        return round_trip(self.template, tools, self._read)

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        """(T,) what the template writes up to where the model begins."""

        def render() -> list[int]:
            ids = self.control.encode(self.template.prompt(messages, tools))
            # A template and a tokenizer may both put the beginning-of-text token in front.
            bos = self.tokenizer.bos_token_id
            return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

        return _ids(await self._off_loop(messages, render))

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn_ids: IntArray, tools: Sequence[Tool]
    ) -> IntArray:
        """(T,) what the template writes behind ``turn_ids``: a missing terminator, ``new``, the next opening."""

        def render() -> list[int]:
            # Encoded with the terminator even if it is there already, so that the rest is split as after a terminator.
            ids = self.control.encode(self.template.after(turn, new, tools))
            place = next((place for place, id in enumerate(ids) if id in self.stop_token_ids), None)
            if place is None:
                return ids
            own = self.template.own_ends
            ended = last == ids[place] or (last in own and ids[place] in own)
            return ids[place + 1 :] if ended else ids

        turn = before[-1] if before and before[-1].get("role") == "assistant" else {}
        last = int(turn_ids[-1]) if len(turn_ids) else None
        return _ids(await self._off_loop(new, render))

    def written(
        self, new: Sequence[Message], tools: Sequence[Tool], *, turn: Message | None = None, generate: bool = True
    ) -> str:
        """The text of a prompt, or of what follows ``turn``; without ``generate``, up to the model's next opening."""
        if turn is None:
            return self.template.prompt(new, tools, generate=generate)
        return self.template.after(turn, new, tools, generate=generate)

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Read a sampled turn, by the tokenizer's own response template if it has one."""
        return await self._reading(len(turn_ids), lambda: self._read(self._text(turn_ids), tools))

    def _read(self, text: str, tools: Sequence[Tool]) -> ParsedTurn:
        schemas = [tool.schema for tool in tools]
        if self._own_reader:
            return parse_with_template(self.tokenizer, text, prefix=self.template.opening, tools=schemas)
        return parse_calls(text, self.template.notation or TAGS, tools=schemas, thinking=self.template.thinks)


async def open_renderer(
    model: Path, kind: Literal["auto", "chat", "text"], factory: EnvFactory, events: Events, **options: Any
) -> Renderer:
    """What ``load_renderer`` makes of the model and ``options``, in a thread, tried with the environment's tools.

    What its template does not carry through of the tools is reported as a ``Notice``, or raised as ``ConfigError`` if
    the run would only show it by calls that nobody reads or results that the model never sees.
    """

    def load() -> tuple[Renderer, list[Problem]]:
        renderer = load_renderer(model, kind, **options)
        return renderer, renderer.check(factory.tools)

    renderer, problems = await anyio.to_thread.run_sync(load)
    for problem in problems:
        names = ", ".join(problem.tools)
        if problem.refused(factory):
            raise ConfigError(f"the environment has tools ({names}), but {problem.reason} ({problem.name})")
        keys = {"tools": names, "reason": problem.reason}
        events.emit(Notice(time=anyio.current_time(), name=problem.name, level="warning", keys=keys))
    return renderer


def load_renderer(
    model_dir: Path,
    kind: Literal["auto", "chat", "text"] = "chat",
    *,
    stop: Sequence[str] = (),
    template_options: Mapping[str, Any] | None = None,
    announce_tools: AnnounceTools = "template",
) -> ChatRenderer | TextRenderer:
    """Make the renderer of the tokenizer in ``model_dir``. Reads files, so call it in a thread.

    ``auto`` is ``chat`` if the tokenizer has a chat template, else ``text``. The tokens that end a turn are those of
    the tokenizer and of the model's generation config together.
    """
    if kind not in ("auto", "chat", "text"):
        raise ConfigError.for_value("renderer", kind, "'auto', 'chat' or 'text'")
    require_choice("announce_tools", announce_tools, AnnounceTools)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    if kind == "auto":
        kind = "chat" if tokenizer.chat_template else "text"
    if kind == "text" and template_options:
        raise ConfigError.for_value("template_options", dict(template_options), "empty for renderer 'text'")
    ends = _configured_ends(model_dir)
    if kind == "text":
        return TextRenderer(tokenizer, stop=stop, ends=ends, announce_tools=announce_tools)
    how: dict[str, Any] = {"template_options": template_options, "announce_tools": announce_tools}
    return ChatRenderer(tokenizer, stop=stop, ends=ends, **how)


def _configured_ends(model_dir: Path) -> list[int]:
    """The end tokens that the model's own files list: its generation config's, or else its config's."""
    for name in ("generation_config.json", "config.json"):
        file = model_dir / name
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{file}: is not a JSON object: {error}") from error
        ends = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(end) is int and end >= 0 for end in ends):
            raise ConfigError.for_value(f"{file}: eos_token_id", found, "a token id or a list of them")
        if ends:
            return ends
    return []


def _known_ends(tokenizer: Tokenizer, ends: Sequence[int]) -> tuple[int, ...]:
    own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return tuple(dict.fromkeys((*own, *ends)))


def _joined(messages: Sequence[Message]) -> str:
    return "".join(text_of(message.get("content")) for message in messages)


def _size(content: Any) -> int:
    """Characters of a message's content."""
    return len(content) if isinstance(content, str) else len(text_of(content))


def _ids(ids: Sequence[int]) -> IntArray:
    return np.asarray(ids, dtype=np.int32)
