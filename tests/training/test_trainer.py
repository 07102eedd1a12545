"""The trainer's promises beside the schedule: refusals, failures, overlap, evaluation, stopping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

import anyio
import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError, NonFiniteError, ObserverError, PublicationError, ServerUnavailable
from asyncrl.events import (
    BarrierOpened,
    ChunkTrained,
    EvaluationFinished,
    Event,
    Events,
    MemberFailed,
    Notice,
    SegmentSampled,
    StepFinished,
)
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import (
    END,
    ByteRenderer,
    ScriptedLearner,
    ScriptedPublisher,
    ScriptedSampler,
    run_virtual,
    scripted_policy,
)
from asyncrl.training.step import Phase
from asyncrl.types import BarrierWait, Message, Row, Segment, Step, Trajectory, TruncationCause

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")


_UNTRAINED = rl.Failures(untrained_batches=0)
# Nothing need be trained.


class _Env(rl.Env):
    """One turn; the reward is the member's number, so that each group has variance."""

    def __init__(self) -> None:
        self.closed = 0

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.member)

    async def close(self) -> None:
        self.closed += 1


class _Own(rl.GroupCentered):
    """Not the one that is known to need single groups only."""


class _OwnBatchwise(rl.Batchwise):
    """Not the one that is known to need no groups."""


class _Case:
    """A trainer on scripted parts, and everything that it reported."""

    def __init__(
        self,
        *,
        env: Callable[[], rl.Env] = _Env,
        sampler: ScriptedSampler | None = None,
        learner: ScriptedLearner | None = None,
        publisher: ScriptedPublisher | None = None,
        engine: dict[str, Any] | None = None,
        **trainer: Any,
    ) -> None:
        self.sampler = sampler or ScriptedSampler()
        self.learner = learner or ScriptedLearner()
        self.publisher = publisher or ScriptedPublisher()
        self.events: list[Event] = []
        bus = Events()
        bus.subscribe(self.events.append)
        self.engine = rl.RolloutEngine(
            scripted_policy(sampler=self.sampler, learner=self.learner, publisher=self.publisher),
            env=env,
            renderer=ByteRenderer(),
            **(engine or {}),
        )
        options = {"groups_per_step": 2, "group_size": 2, "max_staleness": 0, "optimizer": rl.Adam(lr=1e-3), **trainer}
        self.trainer = rl.AsyncTrainer(engine=self.engine, events=bus, **options)
        self.steps: list[Step] = []

    async def run(self, steps: int = 3, rows: int = 4) -> None:
        """Run to the end."""
        async for step in self.trainer.run(list(range(rows)), steps=steps):
            self.steps.append(step)

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


@pytest.mark.parametrize(
    ("trainer", "engine", "message"),
    [
        ({"max_staleness": -1}, {}, "max_staleness is -1"),
        ({"max_staleness": True}, {}, "max_staleness is True"),
        ({"group_size": 0}, {}, "group_size is 0"),
        ({"group_size": 1}, {}, "at least completion.min_members"),
        ({"groups_per_step": 0}, {}, "groups_per_step is 0"),
        ({"normalize": "tokens"}, {}, "normalize is 'tokens'"),
        ({"loss": "cipso"}, {}, "did you mean 'cispo'"),
        ({"loss": rl.PPO}, {}, "a class, but must be"),
        ({"loss": object()}, {}, "without token_data, diagnostics, per_token, but must be"),
        ({"correction": rl.Correction(token="truncate")}, {}, "CISPO.*would count twice"),
        (
            {"advantage": rl.MaxRL(), "overlong": rl.OverlongPenalty(max_tokens=9, buffer=3)},
            {},
            "overlong is set and advantage is MaxRL",
        ),
        ({"stale_policy": "drop"}, {}, "stale_policy is 'drop'"),
        ({"max_staleness": 2, "forward_backward_batch": rl.ForwardBackwardBatch()}, {}, "max_staleness is 2"),
        ({"advantage": rl.Batchwise(), "forward_backward_batch": rl.ForwardBackwardBatch()}, {}, "GroupCentered"),
        ({"advantage": _Own(), "forward_backward_batch": rl.ForwardBackwardBatch()}, {}, "advantage is _Own"),
        (
            {
                "advantage": _OwnBatchwise(),
                "completion": rl.GroupCompletion(
                    mode="deadline", min_members=1, max_straggler_tokens=8, on_stragglers="carry_over"
                ),
                "max_staleness": 1,
            },
            {},
            "advantage is _OwnBatchwise",
        ),
        ({"stale_policy": "keep", "max_staleness": 1}, {}, "allow_unbounded_staleness"),
        ({"stale_policy": "mask_span", "max_staleness": 1}, {}, "allow_trajectory_loss"),
        ({"truncation": rl.Truncation(train="drop")}, {}, "allow_trajectory_loss"),
        ({"batch_order": "admission", "stale_policy": "keep", "allow_unbounded_staleness": True}, {}, "need 'wait'"),
        ({}, {"temperature": 0.0}, "temperature is 0"),
        ({}, {"temperature": math.nan}, "temperature is nan"),
        ({}, {"top_p": 0.9}, "top_p is 0.9"),
        ({}, {"top_k": 50}, "top_k is 50"),
        ({}, {"schedule": rl.Schedule(oversample_factor=1.5)}, "oversample_factor is 1.5"),
        ({}, {"sampling_policy": "segment"}, "allow_reprefill=True"),
        (
            {},
            {"sampling_policy": "segment", "kv_cache": rl.KVCache(on_limit="refill", max_staleness=2)},
            "allow_reprefill",
        ),
        ({}, {"kv_cache": rl.KVCache(max_staleness=1)}, "leave kv_cache out"),
        ({}, {"environment_timeout": 0}, "environment_timeout is 0"),
    ],
)
def test_what_cannot_run_is_refused_at_once(trainer: dict[str, Any], engine: dict[str, Any], message: str) -> None:
    """The error names the option, the value found, and what to change; nothing has started."""
    with pytest.raises(ConfigError, match=message):
        _Case(engine=engine, **trainer)


def test_full_weights_cannot_keep_a_version_for_a_trajectory() -> None:
    """One server holds one version, so pinning needs an adapter; the refusal lists the choices."""
    with pytest.raises(ConfigError, match="adapter, sample on two or more servers, use sampling_policy='segment'"):
        _Case(publisher=ScriptedPublisher(pins_versions=False), max_staleness=1)
    _Case(publisher=ScriptedPublisher(pins_versions=False), max_staleness=0)


def test_full_weights_can_hold_a_version_only_where_that_never_happens() -> None:
    """A prefix may be as old as the barrier lets anything become, so that the limit is not reached; else refill."""

    def case(**kv_cache: Any) -> None:
        engine = {"sampling_policy": "segment", "kv_cache": rl.KVCache(**kv_cache)}
        _Case(publisher=ScriptedPublisher(pins_versions=False), max_staleness=2, engine=engine)

    with pytest.raises(ConfigError, match=r"on_limit is 'hold' with kv_cache\.max_staleness 1"):
        case(max_staleness=1)
    case(max_staleness=2)
    case(max_staleness=1, on_limit="refill", allow_reprefill=True)


@pytest.mark.parametrize(("rows", "steps"), [(0, 1), (4, 0), (4, -2)])
def test_a_run_needs_rows_and_steps(rows: int, steps: int) -> None:
    """Both are checked when the run is made, not when it is iterated."""
    case = _Case()
    with pytest.raises(ConfigError):
        case.trainer.run(list(range(rows)), steps=steps)


def test_finite_data_ends_with_a_smaller_batch() -> None:
    """Five rows in batches of two: 2, 2, 1; a fourth step is refused."""
    case = _Case(repeat_dataset=False)
    run_virtual(case.run, 3, 5)
    assert [len(step.trajectories) for step in case.steps] == [4, 4, 2]
    with pytest.raises(ConfigError, match="at most 3"):
        case.trainer.run(list(range(5)), steps=4)


class _Flat(_Env):
    async def reward(self, traj: Trajectory, row: Row) -> float:
        return 1.0


def test_a_batch_without_gradient_makes_no_version() -> None:
    """It counts as a step, its slots come back at once, and the optimizer is not called."""
    case = _Case(env=_Flat, engine={"failures": _UNTRAINED})
    run_virtual(case.run)
    assert [(step.n, step.model_step) for step in case.steps] == [(1, 0), (2, 0), (3, 0)]
    assert case.learner.batches == []
    assert case.publisher.published == [0]
    assert case.steps[0].metrics["reward/zero_variance_group_frac"] == 1.0


def test_every_step_has_the_same_metrics() -> None:
    """Keys do not come and go with what happened."""
    flat = _Case(env=_Flat, engine={"failures": _UNTRAINED})
    run_virtual(flat.run)
    varied = _Case()
    run_virtual(varied.run)
    keys = [set(step.metrics) for step in [*flat.steps, *varied.steps]]
    assert all(key == keys[0] for key in keys)


class _BadGrader(_Env):
    async def reward(self, traj: Trajectory, row: Row) -> float:
        if traj.member == 0:
            raise KeyError("no such answer")
        return float(traj.member)


def test_a_grader_that_raises_never_becomes_a_reward() -> None:
    """The member is dropped with its error, the others train."""
    case = _Case(env=_BadGrader, group_size=3)
    run_virtual(case.run)
    assert len(case.steps) == 3
    failed = [traj for traj in case.steps[0].trajectories if traj.member == 0]
    assert all(traj.reward is None and isinstance(traj.error, KeyError) for traj in failed)
    assert case.steps[0].metrics["reward/mean"] == 1.5
    assert case.steps[0].metrics["groups/failed_members"] == 2
    assert all(len(batch) == 4 for batch in case.learner.batches)


class _Broken(_Env):
    async def reward(self, traj: Trajectory, row: Row) -> float:
        raise KeyError(f"member {traj.member}")


def test_when_every_member_fails_the_run_ends_with_the_first_error() -> None:
    """Not a silent wait for a group that never comes."""
    case = _Case(env=_Broken)
    with pytest.raises(KeyError, match="member 0"):
        run_virtual(case.run)


class _Flaky(_Env):
    attempts = 0

    async def reset(self, row: Row) -> list[Message]:
        type(self).attempts += 1
        if type(self).attempts <= self.failures:
            raise rl.InfrastructureError("the sandbox is gone")
        return await super().reset(row)

    failures = 1


def test_lost_infrastructure_is_tried_again_with_a_fresh_environment() -> None:
    """One retry by default; the member then trains like the others."""
    case = _Case(env=type("Once", (_Flaky,), {"attempts": 0, "failures": 1}))
    run_virtual(case.run)
    assert len(case.of(MemberFailed)) == 1
    assert all(traj.reward is not None for traj in case.steps[0].trajectories)


def test_infrastructure_that_stays_lost_ends_the_run() -> None:
    """After the retries the original error is raised."""
    case = _Case(env=type("Always", (_Flaky,), {"attempts": 0, "failures": 10**6}))
    with pytest.raises(rl.InfrastructureError, match="the sandbox is gone"):
        run_virtual(case.run)


class _Stuck(_Env):
    async def on_turn(self, traj: Trajectory) -> None:
        await anyio.sleep_forever()


def test_an_environment_that_never_returns_is_given_up() -> None:
    """The deadline frees the slot; after the retry the run ends and says why."""
    made: list[_Stuck] = []

    def make() -> _Stuck:
        made.append(_Stuck())
        return made[-1]

    case = _Case(env=make, engine={"environment_timeout": 30.0})
    with pytest.raises(rl.InfrastructureError.__mro__[1], match="30"):
        run_virtual(case.run)
    assert all(env.closed == 1 for env in made)


def test_a_gradient_that_is_not_finite_stops_the_run_without_a_version() -> None:
    """The step before it is the last version."""
    learner = ScriptedLearner()
    learner.fail_at = 2
    case = _Case(learner=learner)
    with pytest.raises(NonFiniteError):
        run_virtual(case.run)
    assert [step.model_step for step in case.steps] == [1]
    assert case.publisher.published == [0, 1]


class _FailingPublisher(ScriptedPublisher):
    async def publish(self, version: int) -> float:
        if version == 2:
            raise PublicationError("no server is left")
        return await super().publish(version)


def test_a_failed_publication_ends_the_run() -> None:
    """The trainer does not wait for slots that would never come back."""
    case = _Case(publisher=_FailingPublisher())
    with pytest.raises(PublicationError):
        run_virtual(case.run)


def test_synchronous_chunks_train_while_the_rest_samples() -> None:
    """With a threshold of one group the first pass ends before the slow group has been sampled."""

    def seconds(request: SegmentRequest) -> float:
        return 100.0 if request.trajectory_id.startswith("000001") else 1.0

    case = _Case(
        sampler=ScriptedSampler(seconds=seconds),
        learner=ScriptedLearner(train_s=5.0),
        forward_backward_batch=rl.ForwardBackwardBatch(min_sequences=2),
    )
    run_virtual(case.run, 1)
    assert [event.time for event in case.of(ChunkTrained)] == [6.0, 105.0]
    assert len(case.learner.batches) == 1
    assert len(case.learner.batches[0]) == 4


def test_a_slow_trajectory_makes_the_trainer_wait_while_others_sample() -> None:
    """The barrier waits for one trajectory, says for which and how long, and tokens are sampled meanwhile."""

    def seconds(request: SegmentRequest) -> float:
        if request.trajectory_id == "000000-000":
            return 100.0
        return 1.0 if request.trajectory_id < "000004" else 30.0

    case = _Case(sampler=ScriptedSampler(seconds=seconds), max_staleness=2)
    run_virtual(case.run, 6)
    [opened] = case.of(BarrierOpened)
    assert opened.time == 100.0
    assert opened.wait == BarrierWait(seconds=69.0, group=0, member=0, doing="sampling")
    [step] = [step for step in case.steps if step.waits]
    assert step.waits == (opened.wait,)
    assert (step.metrics["staleness/wait_seconds"], step.metrics["staleness/wait_count"]) == (69.0, 1)
    assert (step.metrics["staleness/wait_group"], step.metrics["staleness/wait_member"]) == (0, 0)
    assert step.metrics["train/barrier_seconds"] == 69.0
    assert max(step.metrics["staleness/span_age_p99"] for step in case.steps) == 2
    during = [event for event in case.of(SegmentSampled) if 31 < event.time < 100]
    assert sum(event.tokens for event in during) > 0


def test_evaluation_is_of_one_version_and_outside_of_training() -> None:
    """Before the first and after the last step, under the published version; its segments are not in the metrics."""
    case = _Case(evaluator=rl.Evaluator(rows=[0, 1, 2], group_size=2), max_staleness=2)
    run_virtual(case.run)
    assert [event.version for event in case.of(EvaluationFinished)] == [0, 3]
    assert [event.metrics["reward_mean"] for event in case.of(EvaluationFinished)] == [0.5, 0.5]
    evaluated = [request for request in case.sampler.requests if request.trajectory_id.startswith("eval")]
    assert {request.version for request in evaluated} == {0, 3}
    assert len(case.sampler.requests) - len(evaluated) == len(case.of(SegmentSampled))


@pytest.mark.parametrize("stop_at_s", [0.0, 0.5, 1.0, 2.5, 3.0, 4.75, 7.0])
def test_stopping_anywhere_leaves_nothing_behind(stop_at_s: float) -> None:
    """Cancelled at any time: no request is in flight, no version is held, every environment is closed once."""
    made: list[_Env] = []

    def make() -> _Env:
        made.append(_Env())
        return made[-1]

    case = _Case(
        env=make,
        sampler=ScriptedSampler(seconds=lambda request: 1.0),
        learner=ScriptedLearner(train_s=1.0, step_s=0.5),
        publisher=ScriptedPublisher(seconds=lambda: 0.25),
        max_staleness=1,
    )

    async def main() -> None:
        with anyio.move_on_after(stop_at_s):
            await case.run(steps=100)

    run_virtual(main)
    assert case.sampler.in_flight == 0
    assert case.learner.pending == []
    assert not +case.publisher.holders
    assert all(env.closed == 1 for env in made)


def test_leaving_the_loop_stops_the_run() -> None:
    """``break`` is enough; the rollouts under way are cancelled."""
    case = _Case(sampler=ScriptedSampler(seconds=lambda request: 1.0), max_staleness=2)

    async def main() -> None:
        steps = case.trainer.run([0], steps=100)
        async for step in steps:
            case.steps.append(step)
            break
        await steps.aclose()

    run_virtual(main)
    assert len(case.steps) == 1
    assert case.sampler.in_flight == 0


@pytest.mark.parametrize("rule", ["zero_reward", "reward"])
def test_truncated_trajectories_count_as_the_rule_says(rule: Any) -> None:
    """Cut after three tokens: the default trains them with 0, ``reward`` with what ``on_truncated`` says."""

    class Judged(_Env):
        async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
            return 10.0 + traj.member

    case = _Case(
        env=Judged,
        sampler=ScriptedSampler(tokens=lambda request: [65] * 8),
        engine={"budget": rl.Budget(max_generated_tokens=3), "failures": _UNTRAINED},
        truncation=rl.Truncation(train=rule),
    )
    run_virtual(case.run)
    assert case.steps[0].metrics["truncated/generated_tokens"] == 1.0
    assert case.steps[0].model_step == (1 if rule == "reward" else 0)


def test_a_turn_in_several_segments_asks_only_for_what_is_left() -> None:
    """Segments of two tokens, a budget of five: requests for 2, 2 and 1, each with all tokens so far."""
    case = _Case(
        sampler=ScriptedSampler(tokens=lambda request: [70, 71]),
        engine={"budget": rl.Budget(max_generated_tokens=5, segment_tokens=2), "failures": _UNTRAINED},
        truncation=rl.Truncation(train="reward"),
    )
    run_virtual(case.run, 1)
    one = [request for request in case.sampler.requests if request.trajectory_id == "000000-000"]
    assert [request.max_new_tokens for request in one] == [2, 2, 1]
    assert [len(request.input_ids) for request in one] == [2, 4, 6]
    assert len({request.seed for request in one}) == 3


def test_the_step_runs_in_lock_step_with_the_caller() -> None:
    """While the caller looks at a step, no optimizer step is taken."""
    case = _Case(max_staleness=2)

    async def main() -> None:
        async for step in case.trainer.run([0, 1], steps=4):
            before = case.learner.version
            await anyio.sleep(100)
            assert case.learner.version == before == step.model_step

    run_virtual(main)


def test_run_is_for_code_without_an_event_loop() -> None:
    """``rl.run`` returns the steps and calls ``on_step`` with each, in a thread if it is a plain function."""
    seen: list[int] = []
    steps = rl.run(_Case().trainer, [0, 1], steps=2, keep=False, log="none", on_step=lambda step: seen.append(step.n))
    assert [step.n for step in steps] == seen == [1, 2]


def test_rollouts_without_a_trainer() -> None:
    """``engine.rollout`` yields each row's group when it is finished, and stops when the loop is left."""
    sampler = ScriptedSampler(
        seconds=lambda request: 5.0 if request.trajectory_id.startswith("000000") else 1.0,
        tokens=lambda request: [65, END],
    )
    engine = rl.RolloutEngine(
        scripted_policy(sampler=sampler), env=_Env, renderer=ByteRenderer(), schedule=rl.Schedule(concurrency=4)
    )

    async def main() -> list[int]:
        return [group.index async for group in engine.rollout(list("abc"), group_size=2)]

    assert run_virtual(main) == [1, 2, 0]
    assert sampler.peak_in_flight == 4


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_seconds_of_a_step_are_all_accounted_for(max_staleness: int) -> None:
    """Each phase has its exact share, and together they are the time from one step to the next."""
    case = _Case(
        sampler=ScriptedSampler(seconds=lambda request: 5.0),
        learner=ScriptedLearner(train_s=3.0, step_s=1.0),
        publisher=ScriptedPublisher(seconds=lambda: 0.5),
        max_staleness=max_staleness,
    )
    run_virtual(case.run)
    ends = [event.time for event in case.of(StepFinished)]
    seconds = [step.metrics["train/batch_seconds"] for step in case.steps]
    assert [0.5 + sum(seconds[: n + 1]) for n in range(3)] == ends
    last = {key: case.steps[-1].metrics[f"train/{key}_seconds"] for key in get_args(Phase)}
    synchronous = max_staleness == 0
    assert last == {
        "wait_for_samples": 5.0 if synchronous else 0.0,
        "barrier": 0.0,
        "forward_backward": 3.0,
        "optimizer": 1.0,
        "publication": 0.5 if synchronous else 0.0,
    }
    assert case.steps[-1].metrics["train/seconds"] == sum(last.values()) - last["wait_for_samples"]


def test_a_metric_of_the_environment_stays_once_it_was_there() -> None:
    """Also one that made no version, one that waited, and one in which a key of the environment appeared."""

    class Uneven(_Env):
        async def reward(self, traj: Trajectory, row: Row) -> float:
            if traj.group >= 4:
                traj.add_metric("surprise", 1.0)
            return 1.0 if traj.group < 2 else float(traj.member)

    case = _Case(env=Uneven, max_staleness=1)
    run_virtual(case.run, 4)
    first, *others = [set(step.metrics) for step in case.steps]
    assert {step.metrics["train/updated"] for step in case.steps} == {0, 1}
    assert others[0] == first
    assert all(keys == first | {"rollout/surprise", "rollout/surprise_mean"} for keys in others[1:])


@pytest.mark.parametrize(
    ("fate", "names"),
    [("truncate", ["stragglers_truncated"]), ("discard", ["old_spans_masked", "stragglers_discarded"])],
)
def test_what_a_deadline_can_lose_is_acknowledged_and_said_once(fate: Any, names: list[str]) -> None:
    """Without the flag it is refused; with it there is one warning for each rule."""
    completion = rl.GroupCompletion(mode="deadline", max_straggler_tokens=0, on_stragglers=fate)
    rule: dict[str, Any] = {"stale_policy": "wait" if fate == "truncate" else "mask_span", "max_staleness": 1}
    with pytest.raises(ConfigError, match=f"on_stragglers='{fate}'.*allow_trajectory_loss=True"):
        _Case(completion=completion, **rule)
    case = _Case(completion=completion, allow_trajectory_loss=True, **rule)
    run_virtual(case.run)
    assert [event.name for event in case.of(Notice)] == names


@pytest.mark.parametrize("rule", ["mask_span", "keep"])
def test_rules_without_a_bound_do_not_wait_and_say_so(rule: Any) -> None:
    """One warning; a straggler holds nobody up; kept, its age is in the metrics, masked, its share."""

    def seconds(request: SegmentRequest) -> float:
        return 100.0 if request.trajectory_id == "000000-000" else 1.0

    case = _Case(
        sampler=ScriptedSampler(seconds=seconds),
        learner=ScriptedLearner(train_s=10.0),
        max_staleness=1,
        stale_policy=rule,
        allow_trajectory_loss=True,
        allow_unbounded_staleness=True,
    )
    run_virtual(case.run, 12)
    name = {"mask_span": "old_spans_masked", "keep": "staleness_not_bounded"}[rule]
    assert [event.name for event in case.of(Notice)] == [name]
    assert case.of(BarrierOpened) == []
    [late] = [step for step in case.steps if any(traj.id == "000000-000" for traj in step.trajectories)]
    assert (late.metrics["staleness/span_age_max"] > 1) == (rule == "keep")
    assert late.metrics["staleness/frac_masked"] == (0.5 if rule == "mask_span" else 0.0)
    trained = len(case.learner.batches[late.n - 1])
    assert trained == (2 if rule == "mask_span" else 4)


@pytest.mark.parametrize("kind", [SegmentSampled, StepFinished])
def test_an_observer_that_raises_ends_the_run(kind: type[Event]) -> None:
    """Wherever the event comes from, a rollout or the trainer: it is never taken for a failure of the member."""
    case = _Case()

    def observe(event: Event) -> None:
        if isinstance(event, kind):
            raise OSError("the disk is full")

    case.trainer.events.subscribe(observe)
    with pytest.raises(ObserverError, match="the disk is full") as caught:
        run_virtual(case.run)
    assert isinstance(caught.value.__cause__, OSError)
    assert case.of(MemberFailed) == []


def test_a_wrong_keyword_is_refused_under_the_name_that_users_call() -> None:
    """The options are the fields of another class, which nobody has heard of."""
    with pytest.raises(TypeError, match=r"^AsyncTrainer\.__init__\(\) .*'learning_rate'"):
        rl.AsyncTrainer(learning_rate=1e-5)  # type: ignore[call-arg]


def test_the_help_of_a_trainer_says_what_each_option_is() -> None:
    """They stand in the docstring of the class that users call."""
    assert all(f"``{option.name}``" in (rl.AsyncTrainer.__doc__ or "") for option in fields(rl.AsyncTrainer))


def test_a_policy_serves_one_run_at_a_time() -> None:
    """A second run that starts while the first is under way is refused."""
    case = _Case(sampler=ScriptedSampler(seconds=lambda request: 1.0))

    async def main() -> None:
        first = case.trainer.run([0], steps=5)
        await anext(first)
        with pytest.raises(ConfigError, match="the policy is in use"):
            await anext(case.trainer.run([0], steps=5))
        await first.aclose()
        second = case.trainer.run([0], steps=5)
        assert (await anext(second)).n == 1
        await second.aclose()

    run_virtual(main)


class _LosingSampler(ScriptedSampler):
    """Its first request is lost."""

    async def sample(self, request: SegmentRequest) -> Segment:
        if not self.requests:
            self.requests.append(request)
            raise ServerUnavailable("no server is left")
        return await super().sample(request)


def test_a_lost_request_gives_its_place_back() -> None:
    """With one request at a time, the run goes on after one was lost; the member is tried again."""
    case = _Case(sampler=_LosingSampler(), engine={"schedule": rl.Schedule(max_sample_requests=1)})
    run_virtual(case.run)
    assert len(case.of(MemberFailed)) == 1
    assert len(case.steps) == 3
