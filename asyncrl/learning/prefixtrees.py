"""What goes through the model at once: sequences as prefix trees without padding, or as rows. Imports no torch.

Sequences that begin alike share what they have in common: it is computed once, forward and backward. In lexicographic
order each sequence has the longest common part with a neighbour. So the tokens that a sequence adds to the one before
it, one after the other, are the trees in depth-first order: the tokens of a node are a slice, and all that come after
them in some sequence are the slice behind it. For "ab", "abcd", "abce" and "x":

    token     a  b  c  d  e  x
    position  0  1  2  3  3  0
    node      [ab      ][c][d][e]  [x]
    below ab        [c  d  e]

Only what is needed for a trained token is kept: nothing after the last one, and not that one itself, which is a target
and no input. Equal targets at the same place are computed once, however many sequences train them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.errors import LearnerError
from asyncrl.learning.base import TrainingSequence
from asyncrl.types import FloatArray

__all__ = ["Nodes", "Pass", "passes", "row_passes"]

Integers: TypeAlias = npt.NDArray[np.int64]

_PAIRS_PER_TOKEN = 12_288
"""Pairs of a query and a key that cost as much as all else of one token: 6 times the width, here 2048, of a model."""

_PASS_COST = 1 / 32
"""What a pass costs by itself, its weights read and their gradients added to, as a part of a full pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """(M,) each; the nodes of all trees of a pass in depth-first order, which partition its tokens."""

    starts: Integers
    """First token."""
    ends: Integers
    """One after the last token."""
    stops: Integers
    """One after the last token of the nodes below; ``ends`` for a leaf."""
    parents: Integers
    """Index of the node above, -1 for a root."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """Whole sequences that go through the model together, and where their trained tokens are.

    Indices of tokens are those of ``ids.ravel()``.
    """

    ids: Integers
    """(R, T) tokens: one row of trees, or rows that are sequences, padded on the right."""
    positions: Integers | None
    """(T,) place of each token in its sequences; None for rows."""
    nodes: Nodes | None
    """None for rows."""
    sequences: tuple[int, ...]
    """Which of the sequences are in here, ascending; those without a trained token are in no pass."""
    tokens_B: tuple[int, ...]
    """Trained tokens of each, N together."""
    places: Integers
    """(U,) the token after which each of the different trained tokens comes, ascending."""
    targets: Integers
    """(U,) the token that comes there."""
    temperatures: FloatArray
    """(U,) what its logits are divided by."""
    rows: Integers
    """(N,) which of the U each trained token is, sequence after sequence."""
    input_tokens: int
    """Tokens of the sequences."""
    cost: float
    """Of its compute, in tokens at the start of a sequence: passes of equal cost take about equally long."""

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.ids.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Input:
    """A sequence up to its last trained token."""

    index: int
    tokens: Integers
    sequence: TrainingSequence


def passes(sequences: Sequence[TrainingSequence], max_tokens: int, *, longest: int | None = None) -> list[Pass]:
    """All trained tokens of ``sequences``, in passes of at most ``max_tokens`` unique tokens; the costliest first.

    So a pass that does not fit into memory fails at once. A tree that is larger is cut between leaves, and what they
    share is computed in both parts. A sequence that is longer by itself has a pass of its own, or one with others that
    share much of it: up to twice its length, so that long prompts are not computed for each answer. Deterministic.

    Sequences of more than ``longest`` tokens are not shared, but rows (see ``row_passes``).
    """
    inputs = _inputs(sequences)
    trees = [one for one in inputs if longest is None or len(one.tokens) <= longest]
    rows = [one for one in inputs if longest is not None and len(one.tokens) > longest]
    return _costliest_first([*_tree_passes(trees, max_tokens), *_row_passes(rows, max_tokens)])


def row_passes(sequences: Sequence[TrainingSequence], max_tokens: int) -> list[Pass]:
    """The same without sharing: rows of similar length, padded on the right, at most ``max_tokens`` with padding."""
    return _costliest_first(_row_passes(_inputs(sequences), max_tokens))


def _tree_passes(inputs: Sequence[_Input], max_tokens: int) -> Iterator[Pass]:
    inputs = sorted(inputs, key=lambda one: (one.tokens.astype(">u4").tobytes(), one.index))
    shared = [0, *(_common(one.tokens, other.tokens) for one, other in pairwise(inputs))][: len(inputs)]
    lengths = [len(one.tokens) for one in inputs]
    for start, stop in pairwise(_cuts(np.array(lengths), np.array(shared), max_tokens)):
        yield _tree_pass(inputs[start:stop], [0, *shared[start + 1 : stop]])


def _row_passes(inputs: Sequence[_Input], max_tokens: int) -> Iterator[Pass]:
    parts: list[list[_Input]] = []
    for one in sorted(inputs, key=lambda one: (-len(one.tokens), one.index)):
        if parts and len(parts[-1][0].tokens) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(one)
        else:
            parts.append([one])
    return map(_row_pass, parts)


def _costliest_first(found: Iterable[Pass]) -> list[Pass]:
    return sorted(found, key=lambda one: -one.cost)


def _inputs(sequences: Sequence[TrainingSequence]) -> list[_Input]:
    found = []
    for index, sequence in enumerate(sequences):
        trained = np.flatnonzero(sequence.mask)
        if len(trained):
            if trained[0] == 0:
                raise LearnerError(f"sequence {index} trains its first token, which no token comes before")
            tokens = sequence.tokens[: trained[-1]].astype(np.int64)
            found.append(_Input(index=index, tokens=tokens, sequence=sequence))
    return found


def _common(left: Integers, right: Integers) -> int:
    """Length of the longest common prefix."""
    length = min(len(left), len(right))
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _cuts(lengths: Integers, shared: Integers, max_tokens: int) -> list[int]:
    """Where passes begin and end among sorted sequences: as few repeated and as few, equally full passes as possible.

    A cut before sequence j computes ``shared[j]`` tokens again, and a pass of n tokens costs (max + n^2 / max) / 32
    beside its tokens. For tokens without common prefixes the sum is least if passes are full, and then if equally so.
    """
    count = len(lengths)
    # Tokens of the sequences i..j-1 in one pass: shared[i] + totals[j] - totals[i].
    totals = np.concatenate([[0], np.cumsum(lengths - shared)])
    most = max(max_tokens, 2 * int(lengths.max(initial=0)))
    least = np.zeros(count + 1)
    before = np.zeros(count + 1, dtype=np.int64)
    start = 0
    for stop in range(1, count + 1):
        while start < stop - 1 and shared[start] + totals[stop] - totals[start] > most:
            start += 1
        again = shared[start:stop]
        sizes = again + totals[stop] - totals[start:stop]
        longest = np.maximum.accumulate(lengths[start:stop][::-1])[::-1]
        own = _PASS_COST * (max_tokens + sizes.astype(np.float64) ** 2 / max_tokens)
        costs = np.where(sizes <= np.maximum(max_tokens, 2 * longest), least[start:stop] + again + own, np.inf)
        choice = int(costs.argmin())
        least[stop], before[stop] = costs[choice], start + choice
    cuts = [count]
    while cuts[-1] > 0:
        cuts.append(int(before[cuts[-1]]))
    return cuts[::-1]


def _tree_pass(inputs: Sequence[_Input], shared: Sequence[int]) -> Pass:
    """``shared``: tokens that each input has in common with the one before it."""
    paths: list[Integers] = []
    parts: list[Integers] = []
    offset = 0
    path = np.zeros(0, dtype=np.int64)
    for one, common in zip(inputs, shared, strict=True):
        added = len(one.tokens) - common
        path = np.concatenate([path[:common], np.arange(offset, offset + added)])
        paths.append(path)
        parts.append(one.tokens[common:])
        offset += added
    positions = np.concatenate([np.arange(common, len(path)) for path, common in zip(paths, shared, strict=True)])
    nodes = _nodes(paths, shared)
    return _pass(
        inputs,
        paths,
        ids=np.concatenate(parts)[None],
        positions=positions,
        nodes=nodes,
        cost=offset + float(positions.sum()) / _PAIRS_PER_TOKEN,
    )


def _nodes(paths: Sequence[Integers], shared: Sequence[int]) -> Nodes:
    # A node ends where a later sequence leaves the path of the one before it, and where its sequence ends.
    leaves = [path[common - 1] + 1 for path, common in zip(paths, shared[1:], strict=False) if common]
    begins = {int(path[common]): common for path, common in zip(paths, shared, strict=True) if common < len(path)}
    size = 1 + max(int(path[-1]) for path in paths)
    bounds = sorted({*begins, *(int(leaf) for leaf in leaves), size})
    stops = np.full(len(bounds) - 1, size, dtype=np.int64)
    parents = np.full(len(bounds) - 1, -1, dtype=np.int64)
    depth = 0
    opened: list[tuple[int, int]] = []  # (node, depth of its end), the path to where we are
    for node, (start, end) in enumerate(pairwise(bounds)):
        depth = begins.get(start, depth)
        while opened and opened[-1][1] > depth:
            stops[opened.pop()[0]] = start
        if opened:
            parents[node] = opened[-1][0]
        depth += end - start
        opened.append((node, depth))
    edges = np.array(bounds, dtype=np.int64)
    return Nodes(starts=edges[:-1], ends=edges[1:], stops=stops, parents=parents)


def _row_pass(inputs: Sequence[_Input]) -> Pass:
    inputs = sorted(inputs, key=lambda one: one.index)
    longest = max(len(one.tokens) for one in inputs)
    ids = np.zeros((len(inputs), longest), dtype=np.int64)
    for row, one in enumerate(inputs):
        ids[row, : len(one.tokens)] = one.tokens
    return _pass(
        inputs,
        [np.arange(row * longest, row * longest + len(one.tokens)) for row, one in enumerate(inputs)],
        ids=ids,
        positions=None,
        nodes=None,
        cost=ids.size * (1 + longest / 2 / _PAIRS_PER_TOKEN),
    )


def _pass(
    inputs: Sequence[_Input],
    paths: Sequence[Integers],
    *,
    ids: Integers,
    positions: Integers | None,
    nodes: Nodes | None,
    cost: float,
) -> Pass:
    """``paths``: where in ``ids`` the tokens of each input are."""
    pairs = sorted(zip(inputs, paths, strict=True), key=lambda pair: pair[0].index)
    trained = [np.flatnonzero(one.sequence.mask) for one, _ in pairs]
    tokens_B = tuple(len(tokens) for tokens in trained)
    places = _joined(path[tokens - 1] for (_, path), tokens in zip(pairs, trained, strict=True))
    targets = _joined(one.sequence.tokens[tokens] for (one, _), tokens in zip(pairs, trained, strict=True))
    temperatures = np.repeat(np.array([one.sequence.temperature for one, _ in pairs], dtype=np.float32), tokens_B)
    order = np.lexsort((temperatures, targets, places))
    new = np.concatenate([[True], _any_differs(places[order], targets[order], temperatures[order])])
    rows = np.empty(len(order), dtype=np.int64)
    rows[order] = np.cumsum(new) - 1
    kept = order[new]
    return Pass(
        ids=ids,
        positions=positions,
        nodes=nodes,
        sequences=tuple(one.index for one, _ in pairs),
        tokens_B=tokens_B,
        places=places[kept],
        targets=targets[kept],
        temperatures=temperatures[kept],
        rows=rows,
        input_tokens=sum(len(one.sequence.tokens) for one, _ in pairs),
        cost=cost,
    )


def _joined(parts: Iterable[npt.NDArray[np.integer]]) -> Integers:
    return np.concatenate([part.astype(np.int64) for part in parts])


def _any_differs(*columns: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """(N - 1,) whether a row differs from the one before it."""
    differs: npt.NDArray[np.bool_] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return differs
