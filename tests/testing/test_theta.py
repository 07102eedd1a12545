"""The smallest model: a distribution, its draws, and how theta travels."""

from __future__ import annotations

import base64
import pickle  # noqa: TID251  written as a publisher writes it, never read
import random
from pathlib import Path

import numpy as np
import pytest

from asyncrl.testing.theta import (
    ThetaLearner,
    draw_token,
    find_theta,
    find_theta_in,
    read_theta,
    theta_distribution,
    theta_logprobs,
    write_theta,
)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("theta", [-1.0, 0.0, 0.3])
def test_it_is_a_distribution_at_each_temperature(theta: float, temperature: float) -> None:
    """Its probabilities add up to one, and the temperature divides the logits."""
    logprobs = theta_distribution(theta, temperature).astype(np.float64)
    assert np.exp(logprobs).sum() == pytest.approx(1.0, abs=1e-5)
    tempered = theta_distribution(theta).astype(np.float64) / temperature
    np.testing.assert_allclose(logprobs, tempered - np.log(np.exp(tempered).sum()), atol=1e-5)


def test_thetas_that_are_close_are_told_apart() -> None:
    """By more than a probe tolerates."""
    assert np.abs(theta_distribution(0.1) - theta_distribution(0.2)).max() > 0.01


def test_tokens_are_drawn_as_often_as_it_says() -> None:
    """10,000 draws, against the probabilities of the likeliest tokens."""
    source = random.Random(0)
    drawn = np.array([draw_token(0.5, source.random(), temperature=0.7) for _ in range(10_000)])
    chances = np.exp(theta_distribution(0.5, 0.7))
    for token in np.argsort(-chances)[:5]:
        assert (drawn == token).mean() == pytest.approx(chances[token], abs=0.01)


def test_greedy_and_cut_draws() -> None:
    """Temperature 0 and top-k 1 take the likeliest; a small top-p takes one of the likeliest."""
    likeliest = int(theta_distribution(0.5).argmax())
    assert draw_token(0.5, 0.99, temperature=0.0) == likeliest
    assert draw_token(0.5, 0.99, temperature=1.0, top_k=1) == likeliest
    order = np.argsort(-theta_distribution(0.5))
    assert draw_token(0.5, 0.999, temperature=1.0, top_p=0.1) in order[:20]
    np.testing.assert_array_equal(theta_distribution(0.5, 0.0), theta_distribution(0.5))


async def test_a_learner_gives_theta_as_a_folder_as_a_name_and_as_logprobs(tmp_path: Path) -> None:
    """A server learns the same number, whichever way it comes."""
    learner = ThetaLearner(theta=-0.25)
    await learner.export(tmp_path)
    assert find_theta_in(tmp_path) == -0.25
    assert read_theta(tmp_path) == -0.25
    weights = await learner.weights()
    assert find_theta([b"nothing", *(name.encode() for name in weights)]) == -0.25
    tokens = np.array([7, 8, 9], dtype=np.int32)
    scored = await learner.logprobs(tokens, start=1, temperature=0.5)
    np.testing.assert_array_equal(scored, theta_logprobs([8, 9], -0.25, temperature=0.5))


@pytest.mark.parametrize("theta", [0.0, 1.5, -2.0, 1e-05, 0.30000000000000004])
@pytest.mark.parametrize("protocol", range(6))
def test_theta_is_found_in_a_payload_that_nobody_unpickles(theta: float, protocol: int) -> None:
    """The name of a tensor stands in it as text."""
    content = base64.b64decode(base64.b64encode(pickle.dumps([(f"theta:{theta}", b"\x00\x01")], protocol=protocol)))
    assert find_theta([content]) == theta


def test_a_folder_without_theta_is_none(tmp_path: Path) -> None:
    """And one that was written is."""
    assert find_theta_in(tmp_path) is None
    write_theta(tmp_path, 1.0)
    assert find_theta_in(tmp_path) == 1.0
