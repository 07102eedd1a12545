"""What each token of a rendered conversation is: for people who look at what their model reads.

The tokens are those that a run would send. What they are is found beside that, by rendering once more with marks around
each content. A token that spans an edge counts as what it begins with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from asyncrl.rollout.chattemplate import text_of
from asyncrl.rollout.controltokens import CUT
from asyncrl.rollout.renderer import ChatRenderer, TextRenderer
from asyncrl.rollout.tools import Tool
from asyncrl.types import IntArray, Message

__all__ = ["TokenKind", "TokenRun", "environment_runs", "turn_runs"]

_START, _END = "\u2e28asyncrl:content\u2e29", "\u2e28asyncrl:end\u2e29"
_NOWHERE = 1 << 60
_WINDOW = 8
# Tokens that are decoded again with the next one: a character may be several of them.


class TokenKind(StrEnum):
    """What a token is."""

    CONTROL = "control"
    """A control token, which the template wrote."""
    TEMPLATE = "template"
    """Other text of the template: role names, instructions, the tools."""
    CONTENT = "content"
    """What the environment wrote."""
    GENERATION_PROMPT = "generation prompt"
    """The opening of the message that the model goes on with."""
    MODEL = "model"
    """Sampled by the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Neighbouring tokens of one kind."""

    kind: TokenKind
    ids: tuple[int, ...]
    text: str


def environment_runs(
    renderer: ChatRenderer | TextRenderer,
    new: Sequence[Message],
    tools: Sequence[Tool],
    ids: IntArray,
    *,
    turn: Message | None = None,
) -> list[TokenRun]:
    """``ids``, which hold the ``new`` messages: the prompt, or what follows ``turn``, a message of the model."""
    whole, bare = (renderer.written(new, tools, turn=turn, generate=generate) for generate in (True, False))
    # The beginning may be missing in them, such as the turn's own end token.
    all_ids = renderer.control.encode(whole)
    missing = len(renderer.tokenizer.decode(all_ids[: max(0, len(all_ids) - len(ids))]))
    whole, bare = whole.replace(CUT, ""), bare.replace(CUT, "")
    generation = len(bare) - missing if whole != bare and whole.startswith(bare) else _NOWHERE
    marked = renderer.written(_marked(new), tools, turn=turn).replace(CUT, "")
    return _runs(renderer, ids, marked[missing:], generation)


def turn_runs(renderer: ChatRenderer | TextRenderer, ids: IntArray) -> list[TokenRun]:
    """``ids`` as the model would sample them."""
    runs = _runs(renderer, ids, "", _NOWHERE)
    return [replace(run, kind=TokenKind.MODEL) if run.kind is TokenKind.TEMPLATE else run for run in runs]


def _marked(messages: Sequence[Message]) -> list[Message]:
    return [
        message | {"content": f"{_START}{text_of(message.get('content'))}{_END}"} if message.get("content") else message
        for message in messages
    ]


def _runs(renderer: ChatRenderer | TextRenderer, ids: IntArray, marked: str, generation: int) -> list[TokenRun]:
    """``marked`` is the text of ``ids`` with marks around contents; the generation prompt begins at the character
    ``generation`` of it without marks.
    """
    pieces = _decoded(renderer, ids)
    contents = _contents(marked, "".join(pieces))
    runs: list[TokenRun] = []
    place = 0
    for id, piece in zip(ids.tolist(), pieces, strict=True):
        if place >= generation:
            kind = TokenKind.GENERATION_PROMPT
        elif id in renderer.control.ids:
            kind = TokenKind.CONTROL
        else:
            inside = any(start <= place < end for start, end in contents)
            kind = TokenKind.CONTENT if inside else TokenKind.TEMPLATE
        place += len(piece)
        if runs and runs[-1].kind is kind:
            runs[-1] = replace(runs[-1], ids=(*runs[-1].ids, id), text=runs[-1].text + piece)
        else:
            runs.append(TokenRun(kind=kind, ids=(id,), text=piece))
    return runs


def _contents(marked: str, decoded: str) -> list[tuple[int, int]]:
    """Where contents stand in the decoded text."""
    places: list[tuple[int, int]] = []
    place = 0
    for part in re.split(f"({re.escape(_START)}.*?{re.escape(_END)})", marked, flags=re.DOTALL):
        inside = part.startswith(_START)
        body = part[len(_START) : -len(_END)] if inside else part
        at = max(place, decoded.find(body, place))
        place = at + len(body)
        if inside:
            places.append((at, place))
    return places


def _decoded(renderer: ChatRenderer | TextRenderer, ids: IntArray) -> list[str]:
    """The text that each token adds; nothing for one in the middle of a character."""

    def decode(some: IntArray) -> str:
        return str(renderer.tokenizer.decode(some.tolist(), clean_up_tokenization_spaces=False))

    pieces: list[str] = []
    told = 0
    for place in range(len(ids)):
        start = max(0, min(told, place) - _WINDOW)
        before, after = decode(ids[start:told]), decode(ids[start : place + 1])
        if after.endswith("\ufffd") and place + 1 < len(ids) and place - told < _WINDOW:
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        told = place + 1
    return pieces
