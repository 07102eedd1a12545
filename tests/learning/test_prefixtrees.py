from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import LearnerError
from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.prefixtrees import Nodes, Pass, passes, row_passes
from tests.learning.tiny import sequence_of


def _nodes(nodes: Nodes | None) -> list[tuple[int, int, int, int]]:
    assert nodes is not None
    columns = (nodes.starts.tolist(), nodes.ends.tolist(), nodes.stops.tolist(), nodes.parents.tolist())
    return list(zip(*columns, strict=True))


def _seen(one: Pass, place: int) -> list[int]:
    """The tokens that a token of a pass has before it, and itself, by its nodes or its row."""
    ids = one.ids.ravel()
    if one.nodes is None:
        return [int(token) for token in ids[place - place % one.ids.shape[1] : place + 1]]
    nodes = _nodes(one.nodes)
    (own,) = [index for index, (start, end, _, _) in enumerate(nodes) if start <= place < end]
    path: list[int] = []
    end = place + 1
    while own >= 0:
        path = [*ids[nodes[own][0] : end].tolist(), *path]
        own = nodes[own][3]
        end = nodes[own][1]
    return path


def _trained(one: Pass) -> list[tuple[list[int], int, float]]:
    """For each trained token, sequence after sequence: its context, itself and its temperature."""
    return [(_seen(one, int(one.places[row])), int(one.targets[row]), float(one.temperatures[row])) for row in one.rows]


def test_what_sequences_begin_with_is_there_once() -> None:
    """The example of the module: "ab" is a node with two leaves, "x" a tree by itself."""
    (one,) = passes([sequence_of(text) for text in ("abcz", "abez", "xz")], 100)
    assert one.ids.tolist() == [[ord(token) for token in "abcex"]]
    assert one.positions is not None
    assert one.positions.tolist() == [0, 1, 2, 2, 0]
    assert _nodes(one.nodes) == [(0, 2, 4, -1), (2, 3, 3, 0), (3, 4, 4, 0), (4, 5, 5, -1)]
    assert (one.input_tokens, one.computed_tokens) == (10, 5)


def test_nothing_behind_the_last_trained_token_is_computed() -> None:
    """Nor that token itself, unless another sequence goes on with it."""
    (one,) = passes([sequence_of("abcdef", trained=[2])], 100)
    assert one.ids.tolist() == [[ord("a"), ord("b")]]
    assert (one.places.tolist(), one.targets.tolist()) == ([1], [ord("c")])


def test_equal_targets_of_one_place_are_computed_once() -> None:
    """But not those of another temperature, nor another token at the same place."""
    warm = sequence_of("abc", trained=[2], temperature=1.3)
    (one,) = passes([sequence_of("abc", trained=[1, 2]), sequence_of("abd"), warm, sequence_of("abc")], 100)
    assert one.tokens_B == (2, 2, 1, 2)
    assert len(one.targets) == 4
    assert one.rows.tolist() == [0, 1, 0, 3, 2, 0, 1]


def test_a_tree_is_cut_between_leaves() -> None:
    """What they share is in both parts, and the parts are equally full."""
    found = passes([sequence_of("prompt" + answer + "z") for answer in ("aaaa", "bbbb", "cccc", "dddd")], 16)
    assert [one.computed_tokens for one in found] == [14, 14]


def test_groups_are_not_cut_to_fill_a_pass() -> None:
    """A repeated prompt costs more than a pass that is not full."""
    texts = [prompt * 20 + answer * 3 + "z" for prompt in "pqr" for answer in "abcd"]
    assert [one.computed_tokens for one in passes([sequence_of(text) for text in texts], 50)] == [32, 32, 32]


def test_a_sequence_beyond_the_budget_has_a_pass_of_its_own() -> None:
    """It is trained nevertheless, and first."""
    found = passes([sequence_of("bz"), sequence_of("a" * 30), sequence_of("cz")], 10)
    assert [one.sequences for one in found] == [(1,), (0, 2)]


def test_answers_to_a_prompt_beyond_the_budget_share_it() -> None:
    """As long as the pass is at most twice as long as the longest of them."""
    found = passes([sequence_of("p" * 90 + answer * 20 + "z") for answer in "abcdefgh"], 50)
    assert [one.computed_tokens for one in found] == [170, 170]


def test_sequences_without_trained_tokens_are_in_no_pass() -> None:
    """And no sequences are no passes."""
    assert passes([sequence_of("abc", trained=[])], 10) == []
    assert row_passes([], 10) == []


@pytest.mark.parametrize("packing", [passes, row_passes])
def test_a_first_token_is_not_trained(packing: Callable[..., list[Pass]]) -> None:
    """It would get the log-probability of some other place."""
    with pytest.raises(LearnerError, match="sequence 1 trains its first token"):
        packing([sequence_of("abc"), sequence_of("abc", trained=[0, 2])], 10)


def test_rows_have_similar_lengths() -> None:
    """Longest first; each row costs as much as the longest of its pass. Equal lengths keep their order."""
    found = row_passes([sequence_of("x" * (length + 1)) for length in (3, 9, 4, 10, 3)], 20)
    assert [(one.sequences, one.ids.shape) for one in found] == [((1, 3), (2, 10)), ((0, 2, 4), (3, 4))]


def _drawn(draw: st.DrawFn) -> TrainingSequence:
    length = draw(st.integers(2, 12))
    mask = np.array([False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))])
    return TrainingSequence(
        # Two tokens: most sequences begin alike, and some are equal or the beginning of another.
        tokens=np.array(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)), dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        mask=mask,
        ages=np.zeros(len(mask), dtype=np.int32),
        advantage=0.0,
        weight=1.0,
        temperature=draw(st.sampled_from([1.0, 0.5])),
    )


@given(st.lists(st.composite(_drawn)(), max_size=12), st.integers(1, 40), st.sampled_from([passes, row_passes]))
def test_each_trained_token_once_after_its_own_context(
    sequences: list[TrainingSequence], max_tokens: int, pack: Callable[[Sequence[TrainingSequence], int], list[Pass]]
) -> None:
    """In some pass, which stays within its bounds; and the same again the next time."""
    found = pack(sequences, max_tokens)
    wanted: Counter[int] = Counter()
    for one in found:
        trained = iter(_trained(one))
        for index, tokens in zip(one.sequences, one.tokens_B, strict=True):
            wanted[index] += 1
            places = np.flatnonzero(sequences[index].mask)
            assert tokens == len(places)
            for place in places:
                context, target = sequences[index].tokens[:place].tolist(), int(sequences[index].tokens[place])
                assert next(trained) == (context, target, sequences[index].temperature)
        assert next(trained, None) is None
        longest = max(int(np.flatnonzero(sequences[index].mask)[-1]) for index in one.sequences)
        assert one.computed_tokens <= max_tokens or len(one.sequences) == 1 or one.computed_tokens <= 2 * longest
        assert one.input_tokens == sum(len(sequences[index].tokens) for index in one.sequences)
    assert wanted == Counter(index for index, sequence in enumerate(sequences) if sequence.mask.any())
    assert [one.cost for one in found] == sorted((one.cost for one in found), reverse=True)
    again = pack(sequences, max_tokens)
    assert [(one.ids.tolist(), one.rows.tolist()) for one in again] == [
        (one.ids.tolist(), one.rows.tolist()) for one in found
    ]


@given(st.lists(st.composite(_drawn)(), min_size=1, max_size=12))
def test_nodes_partition_a_pass_in_depth_first_order(sequences: list[TrainingSequence]) -> None:
    """Everything below a node is behind it, and no two tokens of a tree have the same context."""
    for one in passes(sequences, 10_000):
        nodes, ids = _nodes(one.nodes), one.ids.ravel()
        assert [start for start, _, _, _ in nodes] == [0, *[end for _, end, _, _ in nodes[:-1]]]
        for index, (_, end, stop, _) in enumerate(nodes):
            below = {index}
            for later in range(index + 1, len(nodes)):
                if nodes[later][3] in below:
                    below.add(later)
            assert stop == max(nodes[node][1] for node in below)
            assert sum(nodes[node][1] - nodes[node][0] for node in below - {index}) == stop - end
        contexts = [tuple(_seen(one, place)) for place in range(len(ids))]
        assert len(set(contexts)) == len(contexts)
        assert one.positions is not None
        assert [len(context) - 1 for context in contexts] == one.positions.tolist()
