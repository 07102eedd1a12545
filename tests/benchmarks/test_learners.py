"""What the learner's benchmark trains on, and that its learners do the same work."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_learner import Shape, operations
from benchmarks.learners.ours import Ours
from benchmarks.learners.plain import Keep, padded
from benchmarks.learners.workloads import FULL, QUICK, WORKLOADS, samples, write_model


def test_heavy_answers_have_a_tail_of_ten_times_the_median() -> None:
    """The logarithms of their lengths are normal with deviation 1, besides the bounds."""
    lengths = np.log([one.mask.sum() for one in samples("heavy", FULL)])
    assert abs(lengths.mean() - np.log(48)) < 0.5
    assert 0.7 < lengths.std() < 1.3


def test_conversations_share_two_turns_and_train_them_once() -> None:
    """Both ends of a conversation begin alike, and what they share is trained in the first alone."""
    first, second = samples("turns", FULL)[:2]
    shared = 256 + 48 + 64 + 48
    assert np.array_equal(first.tokens[:shared], second.tokens[:shared])
    assert first.tokens[shared] != second.tokens[shared]
    assert first.mask[256:shared].sum() == 2 * 48
    assert not second.mask[:shared].any()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_padded_batches_hold_all_trained_tokens_in_order(workload: str) -> None:
    """Row after row, they are those of the sequences."""
    given = samples(workload, QUICK)
    found = np.concatenate([batch.answers[batch.trained.bool()].numpy() for batch in padded(given)])
    assert np.array_equal(found, np.concatenate([one.tokens[one.mask] for one in given]))


@pytest.mark.slow
def test_our_learner_and_plain_transformers_do_the_same_work(tmp_path: Path) -> None:
    """Loss, log-probabilities, entropy and gradient agree on nested tries."""
    write_model(tmp_path, QUICK)
    given = samples("turns", QUICK)
    plain, ours = Keep(tmp_path), Ours(tmp_path, threads=1)
    one, other = plain.run(given), ours.run(given)
    assert other.loss == pytest.approx(one.loss, rel=1e-4)
    assert other.entropy == pytest.approx(one.entropy, rel=1e-4)
    assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert ours.gradient_norm() == pytest.approx(plain.gradient_norm(), rel=1e-3)


def test_operations_of_a_short_pass_are_six_for_each_weight() -> None:
    """Attention is what grows with the square."""
    shape = Shape(hidden=128, intermediate=256, layers=1, heads=1, key_value_heads=1, vocabulary=1000)
    weights = 4 * 128 * 128 + 3 * 128 * 256 + 1000 * 128
    assert operations(shape, 1) == pytest.approx(6 * weights + 6 * 128)
    assert operations(shape, 1000) == pytest.approx(6000 * weights + 6 * 128 * 1000**2)
