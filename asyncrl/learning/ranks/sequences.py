"""Sequences that both sides know: what ``prepare_step`` has sent is not sent again, and stays the same object there.

A model keeps what it computed of a sequence with the object. Both sides number the sequences of ``prepare_step`` alike,
and forget them at ``end_step``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.learning.base import TrainingSequence

__all__ = ["KnownSequences", "SentSequences"]

_KEEPS, _FORGETS = "prepare_step", "end_step"
_UNNUMBERED = -1


class SentSequences:
    """The driver's side."""

    def __init__(self) -> None:
        # With the object: an id is only unique while it lives.
        self._sent: dict[int, tuple[int, TrainingSequence]] = {}
        self._numbers = itertools.count()

    def replaced(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call that will be made, with what the ranks know already as numbers."""
        if method == _FORGETS:
            self._sent.clear()
        replaced = dict(arguments)
        if "sequences" in replaced:
            replaced["sequences"] = self._numbered(method, replaced["sequences"])
        return replaced

    def _numbered(self, method: str, sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
        new = [sequence for sequence in sequences if id(sequence) not in self._sent]
        if method == _KEEPS:
            for sequence in new:
                self._sent[id(sequence)] = (next(self._numbers), sequence)
        numbers = [self._sent.get(id(sequence), (_UNNUMBERED, None))[0] for sequence in sequences]
        return {"numbers": np.array(numbers, dtype=np.int64), "new": new}


class KnownSequences:
    """The ranks' side."""

    def __init__(self) -> None:
        self._known: dict[int, TrainingSequence] = {}

    def restored(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the driver has them."""
        if method == _FORGETS:
            self._known.clear()
        restored = dict(arguments)
        if "sequences" in restored:
            restored["sequences"] = self._found(**restored["sequences"])
        return restored

    def _found(self, numbers: Any, new: list[TrainingSequence]) -> list[TrainingSequence]:
        arrived = iter(new)
        found = []
        for number in numbers.tolist():
            sequence = self._known.get(number) or next(arrived)
            if number != _UNNUMBERED:
                self._known[number] = sequence
            found.append(sequence)
        return found
