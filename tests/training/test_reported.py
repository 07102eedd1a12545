from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import anyio
import numpy as np
import pytest

from asyncrl.learning.base import ChunkResult, TrainingSequence
from asyncrl.testing import run_virtual
from asyncrl.training import reported
from asyncrl.training.reported import StepReport


def _sequence(ages: Sequence[int]) -> TrainingSequence:
    """A token of the prompt, and then trained ones of these ages."""
    tokens = len(ages) + 1
    return TrainingSequence(
        tokens=np.zeros(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, dtype=np.float32),
        mask=np.arange(tokens) > 0,
        ages=np.array([0, *ages], dtype=np.int32),
        advantage=1.0,
        weight=1.0,
    )


def _result(log_ratios: Sequence[float], **sums: float) -> ChunkResult:
    return ChunkResult(
        tokens=len(log_ratios),
        sums=sums,
        log_ratios=np.array(log_ratios, dtype=np.float32),
        input_tokens=30,
        computed_tokens=10,
    )


def _metrics(report: StepReport) -> Mapping[str, float]:
    return run_virtual(report.metrics)


def test_losses_are_means_over_the_step() -> None:
    """The weighted loss over the divisor, the other sums over the trained tokens of all passes."""
    report = StepReport()
    assert report.losses([1.0]) == {}
    report.record([_sequence([0])], _result([0.0], loss=4.0, kl=1.0))
    report.record([_sequence([0, 0, 0])], _result([0.0] * 3, loss=12.0, kl=2.0))
    assert report.tokens == 4
    assert report.losses([8.0]) == {"loss": 2.0, "kl": 0.75}


def test_the_loss_of_several_updates_is_the_mean_of_theirs() -> None:
    """Each over its own divisor."""
    report = StepReport()
    report.record([_sequence([0])], _result([0.0], loss=4.0))
    report.record([_sequence([0])], _result([0.0], loss=9.0), update=1)
    assert report.losses([4.0, 3.0]) == {"loss": 2.0}


def test_ratios_and_effective_samples_are_exact() -> None:
    """Against their definitions, over all passes."""
    chance = np.random.default_rng(0)
    draws = [chance.normal(0, 0.7, size).astype(np.float32) for size in (40, 100, 60)]
    report = StepReport()
    for number, draw in enumerate(draws):
        report.record([_sequence([0] * len(draw))], _result(draw.tolist()), update=number % 2)
    every = np.concatenate(draws).astype(np.float64)
    ratios, means = np.exp(every), np.exp([draw.astype(np.float64).mean() for draw in draws])
    metrics = _metrics(report)
    expected = {
        "ratio/mean": ratios.mean(),
        "ratio/p99": np.sort(ratios)[197],
        "ratio/max": ratios.max(),
        "ratio/kl": (ratios - 1 - every).mean(),
        "ratio/effective_sample_frac": ratios.sum() ** 2 / (ratios**2).sum() / 200,
        "ratio/effective_sequence_frac": means.sum() ** 2 / (means**2).sum() / 3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert (metrics["train/input_tokens"], metrics["train/computed_tokens"]) == (90.0, 30.0)
    assert metrics["train/sharing_factor"] == 3.0


def test_one_token_that_decides_everything_shows() -> None:
    """Of a hundred tokens, one has all the weight; a common factor of all ratios changes nothing, however large."""
    for factor in (-600.0, 0.0, 600.0):
        report = StepReport()
        report.record([_sequence([0] * 100)], _result([factor + 40.0, *[factor] * 99]))
        assert _metrics(report)["ratio/effective_sample_frac"] == pytest.approx(0.01)


def test_mismatch_is_of_tokens_of_age_zero_before_any_update() -> None:
    """What older tokens and later passes differ by is training, not numerics."""
    report = StepReport()
    report.record([_sequence([0, 0, 1]), _sequence([2, 0])], _result([0.1, -0.2, 5.0, 6.0, 0.3]))
    report.record([_sequence([0])], _result([9.0]), update=1)
    metrics = _metrics(report)
    assert metrics["mismatch/mean"] == pytest.approx(0.2)
    assert metrics["mismatch/p99"] == metrics["mismatch/max"] == pytest.approx(0.3)
    assert metrics["mismatch/age"] == 0.0


def test_without_tokens_of_age_zero_the_youngest_are_measured() -> None:
    """And the age says so."""
    report = StepReport()
    report.record([_sequence([3, 2])], _result([0.5, 0.25]))
    metrics = _metrics(report)
    assert (metrics["mismatch/mean"], metrics["mismatch/age"]) == (0.25, 2.0)


def test_a_step_without_tokens_has_the_same_metrics() -> None:
    """Neutral values, no division by zero; a sequence without trained tokens does not matter, nor that a learner of the
    user's own does not say its log-ratios."""
    report = StepReport()
    report.record([_sequence([0])], _result([0.0]))
    empty, masked = StepReport(), StepReport()
    masked.record([_sequence([]), _sequence([0]), _sequence([])], _result([0.5]))
    silent = StepReport()
    silent.record([_sequence([0, 0])], replace(_result([]), tokens=2))
    assert _metrics(silent)["train/input_tokens"] == 30.0
    assert _metrics(silent).keys() == _metrics(empty).keys() == _metrics(report).keys() == _metrics(masked).keys()
    assert _metrics(empty)["ratio/effective_sample_frac"] == 1.0
    assert _metrics(masked)["ratio/effective_sequence_frac"] == 1.0


def test_many_tokens_are_counted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result."""
    report = StepReport()
    report.record([_sequence([0, 0])], _result([0.5, 0.25]))
    on_the_loop = anyio.run(report.metrics)
    monkeypatch.setattr(reported, "_ON_THE_LOOP", 1)
    assert anyio.run(partial(report.metrics)) == on_the_loop
