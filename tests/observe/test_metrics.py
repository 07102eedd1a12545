from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.events import (
    BarrierOpened,
    ChunkTrained,
    MemberDiscarded,
    MemberFailed,
    SegmentSampled,
    VersionCommitted,
    VersionPublished,
)
from asyncrl.learning.advantages import Batchwise
from asyncrl.observe.metrics import BatchMetrics, MetricsRecorder
from asyncrl.training.assembly import StepAssembly
from asyncrl.training.rewards import TrainingReward
from asyncrl.types import BarrierWait, DropReason, Group, Span, SpanKind, Trajectory, TruncationCause


def _trajectory(
    reward: float | None, *, spans: tuple[tuple[int, int], ...] = (), truncated: TruncationCause | None = None
) -> Trajectory:
    """A trajectory with generated ``spans`` of (version, tokens)."""
    traj = Trajectory(id="t", group=0, member=0, row=None, seed=0, reward=reward, truncated=truncated)
    for version, count in spans:
        traj.append(
            Span(
                kind=SpanKind.GENERATED,
                tokens=np.ones(count, dtype=np.int32),
                logprobs=np.zeros(count, dtype=np.float32),
                version=version,
            )
        )
    return traj


def _group(*members: Trajectory, seconds: float = 0.0) -> Group:
    return Group(index=0, row=None, members_G=members, seconds=seconds)


def _metrics(groups: list[Group], **options: Any) -> dict[str, float]:
    """The metrics of a batch of ``groups``."""
    batch = BatchMetrics(**options)
    for group in groups:
        batch.add(group)
    return batch.metrics()


def _segment(*, tokens: int = 10, prompt: int = 100, cached: int = 60) -> SegmentSampled:
    return SegmentSampled(
        time=1.0,
        group=0,
        member=0,
        version=0,
        prompt_tokens=prompt,
        cached_tokens=cached,
        tokens=tokens,
        queue_seconds=0.5,
        seconds=2.0,
    )


def test_rewards_are_those_of_the_members_that_have_one() -> None:
    """A failed member counts as failed and not as reward 0."""
    failed = _trajectory(None)
    failed.dropped = DropReason.FAILED
    metrics = _metrics([_group(_trajectory(1.0), _trajectory(3.0), failed)], version=0, max_staleness=0)
    assert metrics["reward/mean"] == 2.0
    assert metrics["reward/std"] == 1.0
    assert metrics["groups/failed_members"] == 1.0


def test_ages_are_counted_for_each_span_whatever_its_length() -> None:
    """Ages 0, 1 and 2 of one span each: the long one does not weigh more."""
    traj = _trajectory(1.0, spans=((3, 1), (4, 1000), (5, 1)))
    metrics = _metrics([_group(traj)], version=5, max_staleness=2)
    assert metrics["staleness/span_age_p50"] == 1.0
    assert metrics["staleness/span_age_p99"] == 2.0
    assert metrics["staleness/span_age_max"] == 2.0


def test_the_masked_fraction_counts_tokens_beyond_the_bound() -> None:
    """30 of 40 tokens are three versions old."""
    groups = [_group(_trajectory(1.0, spans=((2, 30), (5, 10))))]
    assert _metrics(groups, version=5, max_staleness=2, masked=True)["staleness/frac_masked"] == 0.75
    assert _metrics(groups, version=5, max_staleness=3, masked=True)["staleness/frac_masked"] == 0.0
    assert _metrics(groups, version=5, max_staleness=2)["staleness/frac_masked"] == 0.0


_MEMBER = st.tuples(
    st.sampled_from([None, *DropReason]),
    st.sampled_from([0.0, 1.0, None]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=4),
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(groups=st.lists(st.lists(_MEMBER, min_size=1, max_size=4), min_size=1, max_size=4), masked=st.booleans())
def test_ages_are_those_of_trained_tokens_and_the_rest_is_wasted(
    groups: list[list[tuple[DropReason | None, float | None, list[tuple[int, int]]]]], masked: bool
) -> None:
    """Whatever became of the members: each token is trained, wasted with its batch, or of a member that failed."""
    batch = BatchMetrics(version=5, max_staleness=2, masked=masked)
    assembly = StepAssembly(
        advantage=Batchwise(),
        normalize="token",
        reward=TrainingReward(),
        min_members=1,
        temperature=1.0,
        version=5,
        max_staleness=2,
        stale_policy="mask_span" if masked else "keep",
    )
    trained: Counter[int] = Counter()
    hidden = failed = 0
    for members in groups:
        made = []
        for dropped, reward, spans in members:
            made.append(_trajectory(reward, spans=tuple(spans)))
            made[-1].dropped = dropped
            failed += made[-1].generated_tokens if dropped is DropReason.FAILED else 0
            for version, count in spans:
                if dropped is None and reward is not None:
                    stale = masked and 5 - version > 2
                    hidden += count if stale else 0
                    trained[5 - version] += 0 if stale else count
        assembly.add([_group(*made)])
        batch.add(_group(*made))
    list(assembly.finish())
    metrics = batch.metrics()
    bins = {age: metrics[f"staleness/age_tokens/{age}"] for age in range(3)}
    assert bins == {age: trained[age] for age in range(3)}
    assert metrics["staleness/age_tokens/older"] == sum(count for age, count in trained.items() if age > 2)
    assert metrics["staleness/span_age_max"] == max((age for age, count in trained.items() if count), default=0)
    assert metrics["staleness/frac_masked"] == hidden / max(1, hidden + trained.total())
    assert assembly.metrics()["train/active_tokens"] == trained.total()
    assert trained.total() + assembly.wasted_tokens + failed == metrics["train/generated_tokens"]


def test_the_age_histogram_weighs_tokens() -> None:
    """One bin for each age up to the bound and one for what is beyond; the mean is over tokens, not spans."""
    groups = [_group(_trajectory(1.0, spans=((1, 5), (3, 30), (4, 10), (5, 15))))]
    metrics = _metrics(groups, version=5, max_staleness=2)
    bins = {key: value for key, value in metrics.items() if key.startswith("staleness/age_tokens/")}
    assert bins == {
        "staleness/age_tokens/0": 15.0,
        "staleness/age_tokens/1": 10.0,
        "staleness/age_tokens/2": 30.0,
        "staleness/age_tokens/older": 5.0,
    }
    assert metrics["staleness/token_age_mean"] == (0 * 15 + 1 * 10 + 2 * 30 + 4 * 5) / 60


def test_groups_that_a_deadline_closed_are_a_share() -> None:
    """Of the groups of the batch."""
    closed = Group(index=1, row=None, members_G=[], seconds=0.0, closed_by_deadline=True)
    metrics = _metrics([closed, _group(), _group(), _group()], version=0, max_staleness=0)
    assert metrics["groups/deadline_frac"] == 0.25


def test_wasted_tokens_are_those_of_failed_attempts_discarded_stragglers_and_untrained_members() -> None:
    """Each is counted when it is known."""
    recorder = MetricsRecorder(started=0.0)
    recorder.observe(MemberFailed(time=0.0, group=0, member=0, attempt=1, error="no", generated_tokens=7))
    recorder.observe(MemberDiscarded(time=0.0, group=0, member=1, generated_tokens=20))
    recorder.add_wasted(100)
    assert recorder.take(1.0, {})["sampling/wasted_tokens"] == 127.0
    assert recorder.take(2.0, {})["sampling/wasted_tokens"] == 0.0


def test_lengths_truncation_and_waiting() -> None:
    """Tokens per trajectory, the share of each cause, and the mean time to complete a group."""
    long = _trajectory(0.0, spans=((0, 30),), truncated=TruncationCause.TURNS)
    groups = [
        _group(_trajectory(1.0, spans=((0, 10),)), long, seconds=1.0),
        _group(_trajectory(1.0, spans=((0, 20),)), _trajectory(1.0, spans=((0, 20),)), seconds=3.0),
    ]
    metrics = _metrics(groups, version=0, max_staleness=0)
    assert metrics["train/generated_tokens"] == 80.0
    assert metrics["length/generated_p50"] == 20.0
    assert metrics["length/generated_p99"] == 30.0
    assert metrics["truncated/turns"] == 0.25
    assert metrics["truncated/context"] == 0.0
    assert metrics["groups/mean_wait_seconds"] == 2.0


def test_environment_numbers_are_summed() -> None:
    """``rollout/<key>`` is the sum over the batch of what trajectories added."""
    first, second = _trajectory(1.0), _trajectory(1.0)
    first.add_metric("tool_calls", 2)
    second.add_metric("tool_calls", 3)
    metrics = _metrics([_group(first, second)], version=0, max_staleness=0, tools=("search",))
    assert metrics["rollout/tool_calls"] == 5.0
    assert metrics["rollout/tool_calls_mean"] == 2.5
    assert metrics["rollout/tool_calls/search"] == 0.0


@given(values=st.lists(st.none() | st.floats(), min_size=1, max_size=6))
def test_a_mean_is_the_sum_for_each_member_of_the_batch(values: list[float | None]) -> None:
    """Whoever did not report the key counts as 0; what is not finite makes both no number."""
    members = [_trajectory(1.0) for _ in values]
    for member, value in zip(members, values, strict=True):
        if value is not None:
            member.metrics["won"] = value
    metrics = _metrics([_group(*members)], version=0, max_staleness=0)
    if all(value is None for value in values):
        assert "rollout/won" not in metrics
        return
    assert metrics["rollout/won_mean"] == pytest.approx(metrics["rollout/won"] / len(values), nan_ok=True)


def test_an_interval_sums_what_happened_in_it() -> None:
    """Two requests in four seconds, with the rate and the cached share that follow from them."""
    recorder = MetricsRecorder(started=10.0)
    recorder.observe(_segment(tokens=10, prompt=100, cached=60))
    recorder.observe(_segment(tokens=30, prompt=100, cached=40))
    metrics = recorder.take(14.0, {"staleness/reserved_groups": 3.0, "sampling/inflight_requests": 7.0})
    assert metrics["sampling/requests"] == 2.0
    assert metrics["sampling/generated_tokens"] == 40.0
    assert metrics["sampling/prompt_tokens"] == 200.0
    assert metrics["sampling/cached_prompt_tokens"] == 100.0
    assert metrics["sampling/queue_seconds"] == 1.0
    assert metrics["sampling/request_seconds"] == 4.0
    assert metrics["sampling/interval_seconds"] == 4.0
    assert metrics["sampling/generated_tokens_per_second"] == 10.0
    assert metrics["sampling/cached_prompt_fraction"] == 0.5
    assert metrics["sampling/inflight_requests"] == 7.0
    assert metrics["staleness/reserved_groups"] == 3.0


def test_an_interval_sums_training_and_waiting() -> None:
    """Counts add up; the longest wait at the barrier says for whom."""
    recorder = MetricsRecorder(started=0.0)
    short = BarrierWait(seconds=0.25, group=4, member=1, doing="sampling")
    recorder.observe(BarrierOpened(time=1.0, wait=short))
    recorder.observe(BarrierOpened(time=2.0, wait=replace(short, seconds=2.0, group=9, member=3)))
    recorder.observe(BarrierOpened(time=3.0, wait=replace(short, seconds=0.5, group=5)))
    recorder.observe(ChunkTrained(time=4.0, n=1, sequences=4, tokens=40, seconds=1.0))
    recorder.observe(ChunkTrained(time=5.0, n=1, sequences=2, tokens=20, seconds=0.5))
    recorder.observe(VersionCommitted(time=6.0, version=1))
    recorder.observe(VersionPublished(time=7.0, version=1, seconds=0.75, probe_error=0.0))
    metrics = recorder.take(8.0, {})
    assert metrics["staleness/wait_seconds"] == 2.75
    assert metrics["staleness/wait_count"] == 3.0
    assert (metrics["staleness/wait_group"], metrics["staleness/wait_member"]) == (9.0, 3.0)
    assert metrics["train/backward_chunks"] == 2.0
    assert metrics["train/datums"] == 6.0
    assert metrics["publication/seconds"] == 0.75
    assert metrics["publication/versions"] == 1.0
    assert metrics["train/updated"] == 1.0


def test_every_step_has_the_same_keys() -> None:
    """Zero instead of missing: a logger that fixes its columns at the first step keeps them."""
    recorder = MetricsRecorder(started=0.0)
    recorder.observe(_segment())
    busy = recorder.take(1.0, {})
    idle = recorder.take(3.0, {})
    assert busy.keys() == idle.keys()
    assert {key: value for key, value in idle.items() if value > 0} == {"sampling/interval_seconds": 2.0}
    assert _metrics([], version=0, max_staleness=0).keys() == (
        _metrics([_group(_trajectory(1.0, spans=((0, 3),)))], version=0, max_staleness=0).keys()
    )


@pytest.mark.parametrize("cause", TruncationCause)
def test_every_truncation_cause_is_a_metric(cause: TruncationCause) -> None:
    """A new cause cannot be forgotten."""
    groups = [_group(_trajectory(0.0, truncated=cause))]
    assert _metrics(groups, version=0, max_staleness=0)[f"truncated/{cause.value}"] == 1.0
