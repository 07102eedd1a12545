from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learning.torch_model import micro_batches


def test_similar_lengths_share_a_micro_batch() -> None:
    """Longest first; each row costs as much as the longest of its micro-batch."""
    assert micro_batches([3, 9, 4, 10], max_tokens=20) == [[3, 1], [2, 0]]


def test_equal_lengths_keep_their_order() -> None:
    """So that the sum of the gradient is always the same to the last bit."""
    assert micro_batches([2, 2, 2], max_tokens=4) == [[0, 1], [2]]


def test_a_sequence_beyond_the_budget_is_alone() -> None:
    """It is trained nevertheless."""
    assert micro_batches([50, 3], max_tokens=10) == [[0], [1]]


def test_nothing_to_cut() -> None:
    """No sequences, no micro-batches."""
    assert micro_batches([], max_tokens=10) == []


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 300))
def test_every_sequence_once_and_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    """A partition whose parts, padded, stay within the budget unless they are one sequence; and no part too many."""
    batches = micro_batches(lengths, max_tokens=max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or longest * len(batch) <= max_tokens
    for batch in batches[:-1]:
        assert lengths[batch[0]] * (len(batch) + 1) > max_tokens, "the next sequence would have fitted"
