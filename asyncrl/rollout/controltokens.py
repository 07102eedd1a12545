"""Control tokens: which tokens of a tokenizer steer a model, and how text is encoded so that content never becomes one.

A tokenizer turns the text ``<|im_end|>`` into the token that ends a message, whoever wrote it. So what tools, rows and
users write is *shielded* before a template sees it: a mark cuts each spelling of a control token in two, and ``encode``
encodes the text on both sides of a mark apart. Content is unchanged by that, and text without such spellings is encoded
exactly as the tokenizer does it.

Left out: what a model samples. Its ids stay as they are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

__all__ = ["CUT", "QUESTION", "TURN", "ControlTokens", "Tokenizer"]

Tokenizer: TypeAlias = Any
"""A transformers tokenizer, whose methods are annotated too loosely to be of use."""

CUT = "\u2e28asyncrl:cut\u2e29"
"""The mark: printable, so that it survives JSON and ``repr``, and cut itself where content has it."""
QUESTION = "asyncrl:question"
"""Stands for what a user said where only what follows counts; cut in content too."""
TURN = "asyncrl:turn"
"""The same for what a model said."""
_REPLACEMENT = "\ufffd"
_SHORT = 64
# Characters: texts of up to that length, such as the words of a tool's schema, are shielded again and again.
_REMEMBERED = 1024


class ControlTokens:
    """The control tokens of a tokenizer.

    They are its special tokens, and of its other added tokens those that look like a marker (``<think>``,
    ``[TOOL_CALLS]``): an added token that is a word or white space is text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        specials = set(tokenizer.all_special_ids)
        added = {id: (str(token), bool(token.special)) for id, token in tokenizer.added_tokens_decoder.items()}
        for id, text in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=False):
            added.setdefault(int(id), (str(text), True))
        self.texts: Mapping[int, str] = {
            id: text for id, (text, special) in added.items() if special or id in specials or _is_marker(text)
        }
        """Token -> how it is spelled."""
        self.specials = frozenset(id for id in self.texts if id in specials or added[id][1])
        """Those that the tokenizer itself calls special."""
        everything = [text for text in self.texts.values() if text]
        self._everywhere = _Cuts(everything)
        self._in_turns = _Cuts([self.texts[id] for id in self.specials if self.texts[id]])
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = getattr(backend, "normalizer", None)
        self._anchor = self._find_anchor()

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all of them."""
        return frozenset(self.texts)

    def shield(self, value: Any, *, model_turn: bool = False) -> Any:
        """``value``, text or anything made of text, with each spelling of a control token cut.

        ``model_turn``: markers that the tokenizer does not call special stay, as those of reasoning and calls in a
        turn that an environment shows to the model as an example.
        """
        if isinstance(value, str):
            return self._shield_text(value, self._in_turns if model_turn else self._everywhere)
        if isinstance(value, Mapping):
            return {self.shield(key): self.shield(item, model_turn=model_turn) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.shield(item, model_turn=model_turn) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that may hold marks; the marks leave nothing behind."""
        first, *others = text.split(CUT)
        ids = self._encode(first)
        for piece in others:
            # Behind an anchor, for some tokenizers put a space in front of a text.
            ids += self._encode(self._anchor + piece)[1:] if self._anchor else self._encode(piece)
        return ids

    def whole(self, text: str, place: int) -> int:
        """``place``, or where the control token begins that it would cut."""
        return self._everywhere.whole(text, place)

    def _shield_text(self, text: str, cuts: _Cuts) -> str:
        if self._normalizer is not None and not text.isascii():
            # What a normalizer would turn into a control token, such as one in full-width letters.
            normal = self._normalizer.normalize_str(text)
            if cuts.found(normal) and not cuts.found(text):
                text = normal
        return cuts.apply(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _find_anchor(self) -> str:
        """A special token that is one token wherever it stands and changes nothing about what follows."""
        added = self._tokenizer.added_tokens_decoder
        for id in sorted(self.specials & set(added)):
            text = self.texts[id]
            if not getattr(added[id], "rstrip", False) and self._encode(text + "x")[:1] == [id]:
                return text
        return ""


class _Cuts:
    """Finds spellings of tokens in a text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._pattern = re.compile(_pattern_of([*texts, CUT, QUESTION, TURN]))
        self._starts = {text[:length] for text in texts for length in range(2, len(text))}
        self._ends = {text[-length:] for text in texts for length in range(2, len(text))}
        self._longest = max(map(len, texts), default=0)
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._apply)

    def found(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def whole(self, text: str, place: int) -> int:
        matches = self._pattern.finditer(text, max(0, place - self._longest), place + self._longest)
        return next((match.start() for match in matches if match.start() < place < match.end()), place)

    def apply(self, text: str) -> str:
        """``text`` cut within each spelling, and at its own edges if a spelling may go on beyond them."""
        return self._remembered(text) if len(text) <= _SHORT else self._apply(text)

    def _apply(self, text: str) -> str:
        reach = range(2, min(self._longest, len(text) + 1))
        head = CUT if any(text[:length] in self._ends for length in reach) else ""
        tail = CUT if any(text[-length:] in self._starts for length in reach) else ""
        pieces: list[str] = []
        place = 0
        while match := self._pattern.search(text, place):
            at = match.start()
            if match.end() - at == 1:
                pieces.append(text[place:at] + _REPLACEMENT)
            else:
                pieces.append(text[place : at + 1] + CUT)
            place = at + 1
        return head + "".join(pieces) + text[place:] + tail if pieces or head or tail else text


def _is_marker(text: str) -> bool:
    """Like a tag: more than two characters, with signs and not letters at both ends."""
    return len(text) > 2 and not text.isspace() and all(unicodedata.category(text[end])[0] in "PS" for end in (0, -1))


def _pattern_of(texts: Iterable[str]) -> str:
    """A regular expression that finds any of ``texts``; thousands of them cost as much as one."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branch(tree)


def _branch(node: Mapping[str, Any]) -> str:
    choices = [re.escape(character) + _branch(below) for character, below in sorted(node.items()) if character]
    if not choices:
        return ""
    body = choices[0] if len(choices) == 1 and "" not in node else f"(?:{'|'.join(choices)})"
    return body + "?" if "" in node else body
