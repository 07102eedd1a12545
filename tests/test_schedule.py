"""Whole runs on the virtual clock: the real engine, schedule and trainer on scripted parts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.events import BatchTaken, Event, Events, GroupAdmitted, GroupFinished, SegmentSampled, VersionCommitted
from asyncrl.testing import (
    ByteRenderer,
    ScriptedLearner,
    ScriptedPublisher,
    ScriptedSampler,
    heavy_tail,
    run_virtual,
    scripted_policy,
)
from asyncrl.types import Message, Row, SpanKind, Step, Trajectory

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")


class _Chat(rl.Env):
    """A few turns with a tool in between that takes ``wait()`` seconds; the reward varies within a group."""

    def __init__(self, wait: Callable[[], float], turns: int) -> None:
        self._wait = wait
        self._turns = turns

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": f"row {row}"}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        await anyio.sleep(self._wait())
        return None if traj.turns >= self._turns else [{"role": "user", "content": "more"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.member)


class _Run:
    """One scripted run, and what was seen of it."""

    def __init__(self, seed: int, **options: Any) -> None:
        draw = random.Random(seed)
        self.groups_per_step = draw.choice([1, 2, 4])
        self.group_size = 2
        self.sampler = ScriptedSampler(seconds=lambda request: sampled())
        self.learner = ScriptedLearner(train_s=draw.choice([0.0, 0.5, 2.0]), step_s=draw.choice([0.0, 0.1]))
        lag = heavy_tail(seed + 2, median_s=draw.choice([0.1, 1.0]))
        self.publisher = ScriptedPublisher(seconds=lag)
        self.events: list[Event] = []
        sampled = heavy_tail(seed, median_s=1.0)
        waited = heavy_tail(seed + 1, median_s=draw.choice([0.1, 3.0]))
        turns = draw.choice([1, 3])
        bus = Events()
        bus.subscribe(self.events.append)
        segment = options.pop("sampling_policy", "trajectory") == "segment"
        engine = rl.RolloutEngine(
            scripted_policy(sampler=self.sampler, learner=self.learner, publisher=self.publisher),
            env=lambda: _Chat(waited, turns),
            schedule=rl.Schedule(
                concurrency=draw.choice([2, 7, 64]), oversample_factor=options.pop("oversample_factor", 1.0)
            ),
            sampling_policy="segment" if segment else "trajectory",
            kv_cache=rl.KVCache(on_limit="refill", allow_reprefill=True) if segment else None,
            renderer=ByteRenderer(),
        )
        self.trainer = rl.AsyncTrainer(
            engine=engine,
            optimizer=rl.Adam(lr=1e-3),
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            events=bus,
            **options,
        )
        self.steps: list[Step] = []

    async def to_the_end(self, steps: int = 6) -> None:
        """Run all steps."""
        async for step in self.trainer.run(list(range(5)), steps=steps):
            self.steps.append(step)

    def ages(self) -> list[int]:
        """Age of every generated span at the version that was committed when it was trained."""
        return [
            step.model_step - 1 - span.version
            for step in self.steps
            for traj in step.trajectories
            for span in traj.spans
            if span.version is not None
        ]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(100))
def test_every_trained_segment_is_within_the_bound(seed: int, max_staleness: int) -> None:
    """Random durations, task orders, publication lags and concurrencies; both sampling policies; oversampling."""
    run = _Run(
        seed,
        max_staleness=max_staleness,
        sampling_policy="segment" if seed % 3 == 0 else "trajectory",
        oversample_factor=1.5 if max_staleness and seed % 2 else 1.0,
    )
    run_virtual(run.to_the_end, seed=seed)
    ages = run.ages()
    assert [step.n for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert min(ages) >= 0
    assert max(ages) <= max_staleness
    assert all(len(step.trajectories) == run.groups_per_step * run.group_size for step in run.steps)
    ids = Counter(traj.id for step in run.steps for traj in step.trajectories)
    assert set(ids.values()) == {1}
    assert all(count == 0 for count in run.publisher.holders.values())
    assert run.sampler.in_flight == 0


@pytest.mark.parametrize("seed", range(20))
def test_synchronous_training_never_uses_a_token_from_before_the_last_commit(seed: int) -> None:
    """With a bound of 0 every sampling request of a step starts after the commit, and the publication, before it."""
    run = _Run(seed, max_staleness=0)
    run_virtual(run.to_the_end, seed=seed)
    commits = {0: 0.0} | {event.version: event.time for event in run.events if isinstance(event, VersionCommitted)}
    for event in run.events:
        if isinstance(event, SegmentSampled):
            assert event.time - event.seconds >= commits[event.version]
    for step in run.steps:
        assert step.metrics["staleness/span_age_p99"] == 0.0
        assert all(span.version in (None, step.n - 1) for traj in step.trajectories for span in traj.spans)


@pytest.mark.parametrize("seed", range(10))
def test_books_balance_at_every_event(seed: int) -> None:
    """Admitted groups are consumed or outstanding, never both, never more than the slots."""
    run = _Run(seed, max_staleness=2)
    run_virtual(run.to_the_end, seed=seed)
    admitted: set[int] = set()
    finished: set[int] = set()
    consumed: set[int] = set()
    for event in run.events:
        if isinstance(event, GroupAdmitted):
            admitted.add(event.group)
        elif isinstance(event, GroupFinished):
            finished.add(event.group)
        elif isinstance(event, BatchTaken):
            assert not consumed & set(event.groups)
            consumed.update(event.groups)
        assert consumed <= finished <= admitted
        assert len(admitted - consumed) <= 3 * run.groups_per_step
    assert len(consumed) == 6 * run.groups_per_step


def test_trained_tokens_are_the_served_ones() -> None:
    """Ids, log-probabilities and mask of every training sequence come from the sampler, byte for byte."""
    run = _Run(3, max_staleness=2)
    run_virtual(run.to_the_end, seed=3)
    served = {(segment.tokens.tobytes(), segment.logprobs.tobytes()) for segment in run.sampler.segments}
    trajectories = {traj.tokens().tobytes(): traj for step in run.steps for traj in step.trajectories}
    trained = [sequence for batch in run.learner.batches for sequence in batch]
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


@pytest.mark.parametrize("sampling_policy", ["trajectory", "segment"])
def test_a_pinned_trajectory_keeps_its_version_and_others_move(sampling_policy: str) -> None:
    """All segments of a pinned trajectory are of one version while newer ones are published; else they follow."""
    versions: set[int] = set()
    for seed in range(30):
        run = _Run(seed, max_staleness=4, sampling_policy=sampling_policy)
        run_virtual(run.to_the_end, seed=seed)
        for step in run.steps:
            for traj in step.trajectories:
                used = [span.version for span in traj.spans if span.version is not None]
                assert used == sorted(used)
                versions.add(len(set(used)))
    assert versions == {1} if sampling_policy == "trajectory" else max(versions) > 1
