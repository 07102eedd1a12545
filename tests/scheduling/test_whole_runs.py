"""Whole runs on the virtual clock: the real engine, schedule and trainer on scripted parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from asyncrl.events import BarrierOpened, SegmentSampled, VersionCommitted
from asyncrl.types import SpanKind
from tests.scheduling.promises import assert_promises
from tests.scheduling.runs import NEWEST, Run, Shape, drawn

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")

BOUNDS = [0, 1, 2, 4, 8]


def _shapes(seed: int, max_staleness: int) -> Iterator[Shape]:
    """Both sampling policies, with and without oversampling where that is allowed."""
    for kv_cache in (None, NEWEST):
        for factor in [1.0, 1.5] if max_staleness else [1.0]:
            yield drawn(seed, max_staleness=max_staleness, kv_cache=kv_cache, oversample_factor=factor)


@pytest.mark.parametrize("max_staleness", BOUNDS)
@pytest.mark.parametrize("seed", range(60))
def test_every_run_keeps_every_promise(seed: int, max_staleness: int) -> None:
    """Random durations, task orders, lags and concurrencies: the bound, true versions, whole groups, the accounts."""
    for shape in _shapes(seed, max_staleness):
        run = Run(shape)
        assert_promises(run, run.play(seed))


@pytest.mark.parametrize("max_staleness", BOUNDS)
def test_random_runs_go_to_the_limits(max_staleness: int) -> None:
    """Some age is the bound itself, some trainer waits at the barrier, some turn has two versions, some are equal."""
    oldest, waits, versions = 0, 0, set()
    for seed in range(40):
        run = Run(drawn(seed, max_staleness=max_staleness, kv_cache=NEWEST))
        run.play(seed)
        oldest = max([oldest, *(age for trained in run.learner.trained for age in trained.ages)])
        waits += len(run.of(BarrierOpened))
        versions |= {len(trained.sampled) for trained in run.learner.trained}
    assert oldest == max_staleness
    assert (waits > 0) == (max_staleness > 0)
    assert (max(versions) > 1) == (max_staleness > 0)
    assert min(versions) == 1


@pytest.mark.parametrize("seed", range(20))
def test_synchronous_training_never_uses_a_token_from_before_the_last_commit(seed: int) -> None:
    """With a bound of 0 every sampling request of a step starts after the commit, and the publication, before it."""
    run = Run(drawn(seed, max_staleness=0))
    run.play(seed)
    commits = {0: 0.0} | {event.version: event.time for event in run.of(VersionCommitted)}
    for event in run.of(SegmentSampled):
        assert event.time - event.seconds >= commits[event.version]
    for step in run.steps:
        assert step.metrics["staleness/span_age_p99"] == 0.0


def test_trained_tokens_are_the_served_ones() -> None:
    """Ids, log-probabilities and mask of every training sequence come from the sampler, byte for byte."""
    run = Run(replace(drawn(8, max_staleness=2, kv_cache=NEWEST), turns=lambda traj: 2, parts=2))
    run.play(8)
    served = {(segment.tokens.tobytes(), segment.logprobs.tobytes()) for segment in run.sampler.segments}
    trajectories = {traj.tokens().tobytes(): traj for step in run.steps for traj in step.trajectories}
    trained = [sequence for batch in run.learner.batches for sequence in batch]
    assert max(len(traj.spans) for traj in trajectories.values()) == 6
    assert trained
    for sequence in trained:
        traj = trajectories[sequence.tokens.tobytes()]
        offset = 0
        for span in traj.spans:
            part = slice(offset, offset + len(span.tokens))
            assert sequence.mask[part].all() == (span.kind is SpanKind.GENERATED)
            assert sequence.mask[part].any() == (span.kind is SpanKind.GENERATED)
            if span.logprobs is not None:
                assert (span.tokens.tobytes(), span.logprobs.tobytes()) in served
                assert sequence.logprobs[part].tobytes() == span.logprobs.tobytes()
            offset += len(span.tokens)
