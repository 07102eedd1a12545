"""A tokenizer's chat template: what it writes for messages, and for what follows a turn that was sampled.

What follows a turn is found by rendering a small conversation that ends with this turn, its calls included, and the new
messages: it begins where the template ends the turn. So a template that finds a tool's result through the call before
it, or writes the result while it writes the call, writes what it would write in the whole conversation.

Everything that users, rows and tools wrote is shielded: the control tokens in a rendered text are the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.rollout.announcement import AnnounceTools, announced, tagged, with_announcement
from asyncrl.rollout.callvalues import call_message
from asyncrl.rollout.controltokens import QUESTION, TURN, ControlTokens, Tokenizer
from asyncrl.rollout.notations import NOTATIONS, TAGS, Notation
from asyncrl.rollout.toolcalls import are_calls, parse_calls
from asyncrl.rollout.tools import Tool, example_arguments
from asyncrl.types import Message

__all__ = ["ChatTemplate", "example_call", "plain", "result_of", "text_of", "turn_of"]

_ASK: Message = {"role": "user", "content": QUESTION}
_TURN: Message = {"role": "assistant", "content": TURN}
_ARGUMENTS = {"x": "b"}
_KNOWN_TOOL, _KNOWN_ARGUMENTS = "look_up", {"text": "b c", "count": 2, "exact": True}
_KNOWN_KINDS = {"text": {"type": "string"}, "count": {"type": "integer"}, "exact": {"type": "boolean"}}
_OWN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)
# What is passed to each template anyway.


class ChatTemplate:
    """Renders with the chat template of ``tokenizer``.

    ``options`` are variables of the template, such as ``enable_thinking``. ``ends`` are end tokens that the model is
    known to sample. ``announce_tools``: with "text" a system message of ours describes the tools, and with "none"
    nothing does; in both cases the template is not told of them.

    Raises ``ConfigError`` for an option that the template never reads, and for a template that cannot be continued:
    what it writes after a turn has to begin with a special token and not to depend on earlier turns.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        control: ControlTokens,
        *,
        ends: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
        announce_tools: AnnounceTools = "template",
    ) -> None:
        self.announce_tools = announce_tools
        self._tokenizer = tokenizer
        self._control = control
        self._options = dict(options or {})
        self._check_options()
        self._in_parts = False
        self._in_parts = TURN not in (self._try([_ASK, _TURN]) or "")
        self.opening = self._write([_ASK], (), generate=True)
        """A short conversation, up to where the model begins."""
        self.ends, self.own_ends = self._find_ends(ends)
        texts = [control.texts.get(end, "") or str(tokenizer.decode([end])) for end in self.ends]
        self._end = re.compile("|".join(sorted(map(re.escape, texts), key=len, reverse=True)))
        self._arguments_are_text = self._wants_text()
        own_reader = getattr(tokenizer, "response_template", None) is not None
        written = "" if own_reader else self._known_call()
        found = _notation_of(written)
        self._in_tags = announce_tools == "text" and found is None and not own_reader
        markers = set(control.texts.values()) if not written and not own_reader else ()
        marked = next((notation for notation in NOTATIONS if notation.marker in markers), None)
        self.notation = TAGS if self._in_tags else found or marked
        """How the model writes calls; None if the tokenizer's own response template or nothing says so.

        As the template writes them; if it writes none, as models with one of its tokens do."""
        self._has_system = TURN in (self._try([{"role": "system", "content": TURN}, _ASK]) or "")

    @property
    def thinks(self) -> bool:
        """True if it opens the model's message with reasoning that the model has to close."""
        return self.opening.rfind("<think>") > self.opening.rfind("</think>")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool = True) -> str:
        """The opening of a conversation, up to where the model begins."""
        shielded = [
            self._control.shield(plain(message), model_turn=message.get("role") == "assistant") for message in messages
        ]
        if self.announce_tools == "text" and tools:
            shielded = with_announcement(shielded, self._announcement(tools), system=self._has_system)
        return self._write(shielded, tools, generate=generate)

    def after(self, turn: Message, new: Sequence[Message], tools: Sequence[Tool], *, generate: bool = True) -> str:
        """What follows ``turn``, a message of the model: its end token, the ``new`` messages, the next opening."""
        shielded: list[Message] = self._control.shield([plain(message) for message in new])
        calls, answered = _paired(self._control.shield(turn.get("tool_calls") or []), shielded)
        refusal: ConfigError | None = None
        # Some templates know one call in a turn, some none: what they write of the results is what counts.
        for shown in [calls, calls[:1], []] if len(calls) > 1 else [calls, []] if calls else [[]]:
            message = turn_of(self._as_wanted(shown)) if shown else _TURN
            try:
                text = self._write([_ASK, message, *answered], tools, generate=generate)
            except ConfigError as error:
                refusal = refusal or error
                continue
            return self._after_calls(text) if shown else self._after_turn(text)
        assert refusal is not None
        raise refusal

    def calls(self, turn: Message, tools: Sequence[Tool]) -> str:
        """How the model is to write a turn with these calls, without what ends it: as the template writes it.

        If a text of ours describes the tools, and the template writes calls in no way that is read: between tags.
        """
        return tagged(turn) if self._in_tags else self._own_calls(turn, tools)

    def _own_calls(self, turn: Message, tools: Sequence[Tool]) -> str:
        calls = turn_of(self._as_wanted(turn["tool_calls"]))
        body = self._model_text(self._write([_ASK, calls], tools, generate=False))
        end = self._end.search(body)
        return body[: end.start()] if end else body

    def _announcement(self, tools: Sequence[Tool]) -> str:
        schemas = [self._control.shield(tool.schema["function"]) for tool in tools]
        return announced(schemas, self.calls(example_call(tools[0]), tools))

    def _write(self, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool) -> str:
        from jinja2 import TemplateError

        told = tools if self.announce_tools == "template" else ()
        schemas = [self._control.shield(tool.schema) for tool in told] or None
        if self._in_parts:
            messages = [
                message | {"content": [{"type": "text", "text": text_of(message.get("content"))}]}
                for message in messages
            ]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=schemas, add_generation_prompt=generate, tokenize=False, **self._options
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(f"the chat template refuses messages of the roles {roles}: {error}") from error

    def _try(self, messages: Sequence[Message]) -> str | None:
        """What it writes; None if it refuses."""
        try:
            return self._write(messages, (), generate=False)
        except ConfigError:
            return None

    def _model_text(self, text: str) -> str:
        """``text`` from where the model begins to write."""
        _, _, header = self.opening.rpartition(QUESTION)
        _, _, rest = text.rpartition(QUESTION)
        return rest[self._control.whole(rest, _shared(header, rest)) :]

    def _after_calls(self, text: str) -> str:
        """``text`` from where the turn in it, which calls something, ends."""
        body = self._model_text(text)
        end = self._end.search(body)
        if end is None:
            raise ConfigError(f"the chat template writes no end token after a turn that calls a tool: {body!r}")
        return body[end.start() :]

    def _after_turn(self, text: str) -> str:
        """``text`` from where the marked turn in it ends."""
        _, mark, after = text.rpartition(TURN)
        if not mark:
            raise ConfigError(f"the chat template does not write a model message as it is: {text!r}")
        return after

    def _after_mark(self, messages: Sequence[Message], *, generate: bool) -> str:
        return self._after_turn(self._write(messages, (), generate=generate))

    def _find_ends(self, known: Sequence[int]) -> tuple[tuple[int, ...], frozenset[int]]:
        """The tokens that end a turn: all, and those with which the template ends one that calls nothing."""
        last = self._after_mark([_ASK, _TURN], generate=False)
        then = self._after_mark([_ASK, _TURN, _ASK], generate=True)
        earlier: list[Message] = [_ASK, {"role": "assistant", "content": "b"}]
        if self._after_mark([*earlier, _ASK, _TURN, _ASK], generate=True) != then:
            raise ConfigError(
                "the chat template writes text after a turn that depends on earlier turns; it cannot be appended"
            )
        own = [self._first_special(text, known) for text in (then, last)]
        if own[0] is None:
            raise ConfigError(
                f"the chat template ends a model message with {then!r} if another follows, but must end it with a "
                "special token"
            )
        ends = list(dict.fromkeys(end for end in [*own, *known] if end is not None))
        called = self._end_of_call(ends, known)
        return tuple(ends if called is None else [*ends, called]), frozenset(end for end in own if end is not None)

    def _end_of_call(self, ends: Sequence[int], known: Sequence[int]) -> int | None:
        """The special token that ends a turn with a call, if it is none of ``ends``."""
        turn = turn_of([call_message("f", {"x": TURN})])
        result = result_of(turn, "b")
        try:
            last = self._after_mark([_ASK, turn], generate=False)
            then = self._after_mark([_ASK, turn, result], generate=True)
        except ConfigError:
            return None  # it knows no calls
        if any(id in ends for id in self._control.encode(last)):
            return None
        return self._first_special(then[_shared(last, then) :], known)

    def _first_special(self, text: str, known: Sequence[int]) -> int | None:
        wanted = self._control.specials | set(known)
        return next((id for id in self._control.encode(text) if id in wanted), None)

    def _wants_text(self) -> bool:
        """True if the template takes the arguments of a call as text only."""
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
            if self._try([_ASK, _TURN | {"tool_calls": [call_message("f", arguments)]}]) is not None:
                return isinstance(arguments, str)
        return False

    def _as_wanted(self, calls: Sequence[Message]) -> list[Message]:
        if not self._arguments_are_text:
            return list(calls)
        return [
            call | {"function": call["function"] | {"arguments": _json(call["function"]["arguments"])}}
            for call in calls
        ]

    def _known_call(self) -> str:
        """What it writes for a call that is known here; empty if it writes no calls."""
        try:
            text = self._own_calls(turn_of([call_message(_KNOWN_TOOL, _KNOWN_ARGUMENTS)]), ())
        except ConfigError:
            return ""
        return text if _KNOWN_TOOL in text else ""

    def _check_options(self) -> None:
        template = self._tokenizer.chat_template
        text = "\n".join(template.values()) if isinstance(template, Mapping) else str(template)
        read = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL)))
        for name in self._options:
            if name in _OWN or name not in read:
                allowed = "variables that the chat template reads and that are not set anyway"
                raise ConfigError.for_value("template_options", name, allowed)


def _notation_of(text: str) -> Notation | None:
    """The notation that reads ``text`` as the known call."""
    schema = {"function": {"name": _KNOWN_TOOL, "parameters": {"type": "object", "properties": _KNOWN_KINDS}}}
    for notation in NOTATIONS if text else ():
        if are_calls(parse_calls(text, notation, tools=[schema]).tool_calls, _KNOWN_TOOL, _KNOWN_ARGUMENTS):
            return notation
    return None


def turn_of(calls: Sequence[Message]) -> Message:
    """A turn that says nothing beside its calls: what else it said would stand before, behind or in their place."""
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def example_call(tool: Tool) -> Message:
    """A model's turn that calls ``tool`` with arguments that fit its schema."""
    return turn_of([call_message(tool.name, example_arguments(tool))])


def result_of(turn: Message, content: str) -> Message:
    """The result of the first call of ``turn``."""
    call = turn["tool_calls"][0]
    return {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": content}


def plain(message: Message) -> Message:
    """``message`` with its content as one text; raises ``ConfigError`` for parts that are no text."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    return message | {"content": text_of(content)}


def text_of(content: Any) -> str:
    """The text of a message's content: text, None, or parts of text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ConfigError.for_value("content of a message", content, "text or a list of parts of text")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ConfigError.for_value("part of a message's content", part, "text, as {'type': 'text', 'text': ..}")
        texts.append(text)
    return "".join(texts)


def _paired(calls: Sequence[Message], new: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The turn's calls and the new messages, each result with the id and the name of its call.

    A result whose call could not be read, or that an environment made up, gets a call without arguments.
    """
    known = {call.get("id"): call for call in calls}
    unanswered = list(known)
    shown, answered = list(calls), []
    for index, message in enumerate(new):
        if message.get("role") != "tool":
            answered.append(message)
            continue
        id = message.get("tool_call_id") or (unanswered[0] if unanswered else f"call{index:05}")
        if id in unanswered:
            unanswered.remove(id)
        name = known[id]["function"]["name"] if id in known else message.get("name") or "unknown"
        if id not in known:
            known[id] = call_message(name, {}, id)
            shown.append(known[id])
        answered.append(
            {"name": name, "tool_call_id": id}
            | {key: value for key, value in message.items() if value or key == "content"}
        )
    return shown, answered


def _shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
