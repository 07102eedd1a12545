"""What becomes of failures of the trainer; and the promises that failures must not break."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.errors import LearnerError, NonFiniteError, ServerUnavailable
from asyncrl.events import (
    EvaluationFinished,
    GroupAdmitted,
    SegmentSampled,
    VersionCommitted,
    VersionPublished,
)
from asyncrl.learning.base import ChunkResult, TrainingSequence
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import ScriptedLearner, ScriptedPublisher, ScriptedSampler
from asyncrl.types import Message, Row, Segment, StopReason, Trajectory, VersionSpan
from tests.faults.case import AGAIN, Case, One

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")


# the learner's step fails or is interrupted: no version; gradients cleared; the run stops


class _FailingLearner(ScriptedLearner):
    """Fails in the third forward-backward pass."""

    passes = 0

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        self.passes += 1
        result = await super().forward_backward(sequences, loss, updates=updates)
        if self.passes == 3:
            raise LearnerError("the device fell off the bus")
        return result


def test_a_learner_that_fails_makes_no_version_and_keeps_no_gradient() -> None:
    """The run stops with its error; the two steps before it are committed and published."""
    learner = _FailingLearner()
    case = Case(learner=learner, max_staleness=1)
    with pytest.raises(LearnerError, match="fell off the bus"):
        case.play(10)
    assert learner.pending == []
    assert [event.version for event in case.of(VersionCommitted)] == [1, 2]
    assert case.publisher.published == [0, 1, 2]
    assert [step.model_step for step in case.steps] == [1, 2]
    totals = case.audit.ledger.totals
    assert totals.consumed == 4


# NaN or infinite loss/gradient: the step is refused


def test_a_gradient_that_is_not_finite_is_refused_and_its_rows_are_not_consumed() -> None:
    """No version; the rows of the batch are open when the run ends, not trained."""
    learner = ScriptedLearner()
    learner.fail_at = 2
    case = Case(learner=learner)
    with pytest.raises(NonFiniteError):
        case.play(3)
    assert [event.version for event in case.of(VersionCommitted)] == [1]
    assert case.audit.ledger.totals.consumed == 2
    assert case.audit.ledger.close() == 2


class _UnknowingLearner(ScriptedLearner):
    """One log-probability of each pass is no number; the loss is."""

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        result = await super().forward_backward(sequences, loss, updates=updates)
        result.log_ratios[-1] = math.nan
        return result


def test_a_log_probability_that_is_no_number_is_refused_whatever_the_loss_makes_of_it() -> None:
    """Losses and corrections that mask such a token would hide a model that is broken."""
    learner = _UnknowingLearner()
    case = Case(learner=learner)
    with pytest.raises(NonFiniteError, match=r"1 of \d+ trained tokens is nan in a pass of step 1; no step was taken"):
        case.play(3)
    assert learner.pending == []
    assert not case.of(VersionCommitted)


# a task's error is the run's


@pytest.mark.parametrize("bound", [0, 2])
def test_an_error_that_is_nobodys_member_ends_the_run_at_once(bound: int) -> None:
    """The first error of any task is raised, within a second, with nothing left."""

    class Broken(ScriptedPublisher):
        async def publish(self, version: int) -> float:
            if version == 1:
                raise OSError("no space left on device")
            return await super().publish(version)

    case = Case(publisher=Broken(), max_staleness=bound)
    with pytest.raises(OSError, match="no space left"):
        case.play(10)
    assert case.events[-1].time < 1.0


# staleness and capacity when groups have no use


class _MostlyFlat(One):
    """Nine of ten groups have no variance."""

    open = 0

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.member) if traj.group % 10 == 0 else 1.0


@pytest.mark.parametrize("bound", [0, 1])
def test_groups_without_signal_give_their_slots_back(bound: int) -> None:
    """Nine of ten rewards have no variance: the run finishes, and says how many they were."""
    case = Case(_MostlyFlat, max_staleness=bound)
    case.play(20)
    assert len(case.steps) == 20
    assert sum(step.metrics["train/updated"] for step in case.steps) == 4
    case.assert_exactly_once()


def test_two_environments_of_which_one_rejects_everything_do_not_block_each_other() -> None:
    """One factory makes both; rows of the broken kind are dropped, the other kind is trained."""

    class Both(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            if traj.row % 2:
                raise rl.InfrastructureError("this one never works")
            return None

    case = Case(Both, max_staleness=1, engine={"failures": AGAIN})
    case.play(5, rows=8)
    assert {traj.row % 2 for step in case.steps for traj in step.trajectories} == {0}
    assert len(case.steps) == 5
    case.assert_exactly_once()


def test_the_share_of_slow_rows_is_what_was_drawn() -> None:
    """Half of the rows take twenty times as long; of eighty groups, forty are trained."""

    def seconds(request: SegmentRequest) -> float:
        return 20.0 if int(request.trajectory_id[:6]) % 2 else 1.0

    case = Case(sampler=ScriptedSampler(seconds=seconds), max_staleness=2, groups_per_step=4)
    case.play(20, rows=2)
    trained = Counter(traj.row for step in case.steps for traj in step.trajectories)
    assert abs(trained[0] - trained[1]) <= 0.05 * trained.total()
    case.assert_exactly_once()


def test_a_rollout_that_is_always_older_than_the_bound_is_masked_and_the_run_goes_on() -> None:
    """Nothing is admitted again for its age, so nothing piles up; the metric has what was lost."""

    class Long(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            return None if traj.row or traj.turns >= 30 else [{"role": "user", "content": "on"}]

    case = Case(
        Long,
        sampler=ScriptedSampler(seconds=lambda request: 1.0),
        max_staleness=1,
        stale_policy="mask_span",
        allow_trajectory_loss=True,
        engine={"budget": rl.Budget(max_turns=40), "schedule": rl.Schedule(admit_ahead=1)},
    )
    case.play(60, rows=3)
    assert len(case.steps) == 60
    assert max(step.metrics["staleness/frac_masked"] for step in case.steps) > 0
    case.assert_exactly_once()


def test_looking_ahead_by_one_batch_keeps_the_mean_age_near_one_whatever_the_bound() -> None:
    """``admit_ahead`` sets the usual age, ``max_staleness`` the largest."""
    case = Case(
        sampler=ScriptedSampler(seconds=lambda request: 1.0),
        learner=ScriptedLearner(train_s=1.0),
        max_staleness=4,
        engine={"schedule": rl.Schedule(admit_ahead=1)},
    )
    case.play(40)
    late = [step.metrics["staleness/token_age_mean"] for step in case.steps[10:]]
    assert 0.5 <= sum(late) / len(late) <= 1.2


def test_time_in_the_queue_makes_nothing_older_and_nothing_passes_the_bound() -> None:
    """Quick rollouts, a slow trainer, few requests at a time: every trained age is at most one."""
    case = Case(
        sampler=ScriptedSampler(seconds=lambda request: 0.01),
        learner=ScriptedLearner(train_s=10.0),
        max_staleness=1,
        engine={"schedule": rl.Schedule(concurrency=8, max_sample_requests=1)},
    )
    case.play(20)
    assert max(step.metrics["staleness/span_age_max"] for step in case.steps) == 1


def test_a_batch_is_one_version_however_many_passes_it_takes() -> None:
    """Four forward-backward passes in a step: ages and the bound count optimizer steps."""
    case = Case(
        sampler=ScriptedSampler(seconds=lambda request: 1.0 + int(request.trajectory_id[:6]) % 4),
        groups_per_step=4,
        forward_backward_batch=rl.ForwardBackwardBatch(min_sequences=2),
    )
    case.play(3)
    assert case.steps[-1].metrics["train/backward_chunks"] == 4.0
    assert [step.model_step for step in case.steps] == [1, 2, 3]
    assert all(step.metrics["staleness/span_age_max"] == 0 for step in case.steps)


# publication and evaluation beside full slots


def test_a_publication_does_not_wait_for_rollouts_that_hold_every_slot() -> None:
    """All slots are taken by rollouts of a thousand seconds; the version is live at once."""

    def seconds(request: SegmentRequest) -> float:
        return 1.0 if int(request.trajectory_id[:6]) < 2 else 1000.0

    case = Case(
        sampler=ScriptedSampler(seconds=seconds), max_staleness=2, engine={"schedule": rl.Schedule(concurrency=4)}
    )
    case.play(2)
    [version] = [event for event in case.of(VersionPublished) if event.version == 1]
    assert version.time < 2.0


@pytest.mark.parametrize("every", [1, 2])
def test_an_evaluation_is_of_one_version_and_ends_beside_publications(every: int) -> None:
    """Longer than two steps, with training rollouts going on; nothing waits for each other."""
    case = Case(
        sampler=ScriptedSampler(seconds=lambda request: 50.0 if request.trajectory_id.startswith("eval") else 1.0),
        learner=ScriptedLearner(train_s=5.0),
        publisher=ScriptedPublisher(seconds=lambda: 3.0),
        max_staleness=2,
        evaluator=rl.Evaluator(rows=[0, 1, 2], every=every, group_size=2),
    )
    case.play(4)
    versions = [event.version for event in case.of(EvaluationFinished)]
    assert versions == [0, *range(every, 5, every)]
    for version in versions:
        asked = [r for r in case.sampler.requests if r.trajectory_id.startswith(f"eval{version}-")]
        assert {request.version for request in asked} == {version}
        assert len(asked) == 6


# rollouts while the trainer does nothing


def test_sampling_goes_on_while_the_trainer_is_held_up() -> None:
    """A caller that takes a hundred seconds for a step: what is admitted is sampled meanwhile."""
    one_by_one = rl.Schedule(concurrency=1)
    case = Case(sampler=ScriptedSampler(seconds=lambda request: 1.0), max_staleness=2, engine={"schedule": one_by_one})

    async def slow(steps: int, rows: int) -> None:
        async for step in case.start(steps, rows):
            case.steps.append(step)
            await anyio.sleep(100)

    case._run = slow  # type: ignore[method-assign]
    case.play(3)
    during = [event for event in case.of(SegmentSampled) if 4 < event.time < 100]
    assert len(during) >= 4
    assert case.events[-1].time > 200


# aborted segments


class _AbortingSampler(ScriptedSampler):
    """Aborts the first two requests of each turn after two tokens."""

    def __init__(self) -> None:
        super().__init__(seconds=lambda request: 1.0)
        self.asked = Counter[str]()

    async def sample(self, request: SegmentRequest) -> Segment:
        segment = await super().sample(request)
        self.asked[request.trajectory_id] += 1
        if self.asked[request.trajectory_id] > 2:
            return segment
        return Segment(
            tokens=segment.tokens[:2],
            logprobs=segment.logprobs[:2],
            versions=(VersionSpan(version=request.version, start=0, end=2),),
            stop=StopReason.ABORT,
        )


def test_a_trajectory_that_is_aborted_twice_keeps_one_version() -> None:
    """While versions are published: all of its tokens are of the version that it began with."""
    case = Case(sampler=_AbortingSampler(), learner=ScriptedLearner(train_s=0.5), max_staleness=2)
    case.play(10)
    for step in case.steps:
        for traj in step.trajectories:
            spans = [span for span in traj.spans if span.version is not None]
            assert len(spans) == 3
            assert len({span.version for span in spans}) == 1
    assert case.steps[-1].model_step == 10


def test_a_sampler_that_never_comes_back_with_a_token_is_given_up() -> None:
    """Aborts without tokens for ever are a failure of the machinery, and end the run."""

    class Empty(ScriptedSampler):
        async def sample(self, request: SegmentRequest) -> Segment:
            segment = await super().sample(request)
            return Segment(tokens=segment.tokens[:0], logprobs=segment.logprobs[:0], versions=(), stop=StopReason.ABORT)

    case = Case(sampler=Empty())
    with pytest.raises(ServerUnavailable, match="aborted without a token"):
        case.play(1)
    assert len(case.of(GroupAdmitted)) >= 2
