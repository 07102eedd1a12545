"""What a resumed run goes on with, what it refuses, and what it says."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError, NonFiniteError
from asyncrl.events import EvaluationFinished, Event, MemberFailed, MemberResumed, Notice, Underway, VersionCommitted
from asyncrl.learning.losses import CISPO
from asyncrl.sampling.backend import as_backend
from asyncrl.testing import ScriptedPublisher, ScriptedSampler, run_virtual
from asyncrl.types import Message, Row
from tests.resume.runs import Chat, Life, Plan, entries

PLAN = Plan(steps=4, weights_every=100)


def _parameters(plan: Plan) -> str:
    life = Life(plan, None)
    life.play()
    return life.learner.parameters


def _stopped(plan: Plan, directory: Path, seconds: float) -> Life:
    life = Life(plan, directory)
    assert life.play(seconds), "the run was over before"
    return life


def _resumed(plan: Plan, directory: Path, **changes: Any) -> Life:
    life = Life(replace(plan, **changes), directory)
    life.play()
    return life


def test_a_resumed_run_yields_the_steps_that_are_left(tmp_path: Path) -> None:
    """The caller sees every step once, over both processes; a run that is over yields none."""
    first = _stopped(PLAN, tmp_path, 7.0)
    second = _resumed(PLAN, tmp_path)
    numbers = [step.n for step in (*first.steps, *second.steps)]
    assert first.steps
    assert numbers == [1, 2, 3, 4]
    assert _resumed(PLAN, tmp_path).steps == []


def test_updates_since_the_last_weights_are_repeated(tmp_path: Path) -> None:
    """With the same sequences: the parameters are those of a run that was never stopped."""
    _stopped(PLAN, tmp_path, 7.0)
    life = _resumed(PLAN, tmp_path)
    assert life.learner.parameters == _parameters(PLAN)
    assert [step.metrics["recovery/steps_replayed"] for step in life.steps] == [2.0, 2.0]
    [notice] = [notice for notice in life.of(Notice) if notice.name == "resumed"]
    assert (notice.keys["step"], notice.keys["version"], notice.keys["replayed"]) == (2, 2, 2)


def test_saved_weights_make_repeating_short(tmp_path: Path) -> None:
    """Only the updates after them; the journal before them is gone."""
    plan = replace(PLAN, weights_every=2)
    _stopped(plan, tmp_path, 9.5)
    assert [entry.n for entry in entries(tmp_path)] == [3]
    life = _resumed(plan, tmp_path)
    assert life.steps[0].metrics["recovery/steps_replayed"] == 1.0
    assert life.learner.parameters == _parameters(plan)


def test_a_stop_saves_weights_where_repeating_would_take_longer(tmp_path: Path) -> None:
    """Two steps of eight seconds are not worth repeating, and nothing else changes."""
    plan = replace(PLAN, train_s=4.0)
    _stopped(plan, tmp_path, 14.0)
    life = _resumed(plan, tmp_path)
    assert [step.metrics["recovery/steps_replayed"] for step in life.steps] == [0.0, 0.0]
    assert life.learner.parameters == _parameters(plan)


def test_a_stop_does_not_wait_for_ever_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After half a minute the run ends with a notice; the journal has what is missing."""
    plan = replace(PLAN, train_s=4.0)
    life = Life(plan, tmp_path)

    save = life.learner.save_state

    async def save_state(directory: Path) -> None:
        await save(directory)
        await anyio.sleep(1000.0 if life.steps else 0.0)  # the first save is of a fresh adapter

    monkeypatch.setattr(life.learner, "save_state", save_state)
    assert life.play(14.0)
    assert [notice.name for notice in life.of(Notice)] == ["weights_not_saved"]
    again = _resumed(plan, tmp_path)
    assert [step.metrics["recovery/steps_replayed"] for step in again.steps] == [2.0, 2.0]
    assert again.learner.parameters == _parameters(plan)
    assert [(event.done, event.total) for event in again.of(Underway) if event.total] == [(1, 2), (2, 2)]


def test_without_checkpointing_the_metrics_are_there_too() -> None:
    """Zero, so that a logger has the same columns."""
    life = Life(PLAN, None)
    life.play()
    for name in ("steps_replayed", "trajectories_recovered", "trajectories_dropped_on_resume"):
        assert all(step.metrics[f"recovery/{name}"] == 0.0 for step in life.steps)


@pytest.mark.parametrize("recovery", ["stateless", "snapshot"])
def test_a_conversation_goes_on_from_its_tokens(tmp_path: Path, recovery: str) -> None:
    """Its next request has all that was sampled before; nothing of that is sampled again."""
    plan = replace(PLAN, recovery=recovery, turns=3)
    first = _stopped(plan, tmp_path, 1.3)
    sampled = {request.trajectory_id: request for request in first.sampler.requests}
    second = _resumed(plan, tmp_path)
    resumed = second.of(MemberResumed)
    assert resumed
    assert all(event.recovered and event.generated_tokens for event in resumed)
    for event in resumed:
        name = f"{event.group:06d}-{event.member:03d}"
        again = next(request for request in second.sampler.requests if request.trajectory_id == name)
        assert len(again.input_ids) >= len(sampled[name].input_ids)
    last = second.steps[-1].metrics
    assert last["recovery/trajectories_recovered"] == len(resumed)
    assert second.learner.parameters == _parameters(plan)


def test_what_cannot_go_on_begins_again_with_its_seed(tmp_path: Path) -> None:
    """``recovery="drop"`` is the default, because nobody can see what an environment remembers; it is counted."""
    plan = replace(PLAN, recovery="drop", turns=3)
    first = _stopped(plan, tmp_path, 1.3)
    second = _resumed(plan, tmp_path)
    resumed = second.of(MemberResumed)
    assert resumed
    assert not any(event.recovered for event in resumed)
    assert second.steps[0].metrics["recovery/trajectories_dropped_on_resume"] == len(resumed)
    assert second.steps[0].metrics["sampling/wasted_tokens"] >= sum(event.generated_tokens for event in resumed)
    seeds = {request.trajectory_id: request.seed for request in reversed(first.sampler.requests)}
    again = {request.trajectory_id: request.seed for request in reversed(second.sampler.requests)}
    assert {name: again[name] for name in seeds if name in again} == {
        name: seed for name, seed in seeds.items() if name in again
    }


class _Forgetful(ScriptedPublisher):
    """Cannot bring back any version of an earlier process."""

    async def adopt(self, versions: Any) -> frozenset[int]:
        return frozenset()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_pinned_trajectory_needs_its_version(tmp_path: Path, keeps: bool) -> None:
    """If servers can load it again the trajectory goes on under it; if not, it begins again under the newest."""
    slow = replace(
        PLAN,
        max_staleness=1,
        turns=3,
        steps=5,
        sampling_s=lambda request: 3.0 if request.trajectory_id.startswith("000001") else 0.2,
        trainer={},
    )
    first = _stopped(slow, tmp_path, 5.0)
    assert first.learner.version >= 1
    life = Life(slow, tmp_path)
    if not keeps:
        life.publisher = _Forgetful(seconds=lambda: 0.4)
        life.engine.policy._publisher = life.publisher
    life.play()
    versions = {request.version for request in life.sampler.requests if request.trajectory_id.startswith("000001")}
    assert (0 in versions) == keeps
    assert [step.n for step in (*first.steps, *life.steps)] == [1, 2, 3, 4, 5]
    metric = "recovered" if keeps else "dropped_on_resume"
    assert life.steps[-1].metrics[f"recovery/trajectories_{metric}"] > 0
    assert not +life.publisher.holders


def test_capacity_is_that_of_one_run(tmp_path: Path) -> None:
    """Resumed at a later version, no more groups run before the first commit than without."""
    plan = replace(PLAN, max_staleness=2, steps=8, trainer={})
    _stopped(plan, tmp_path, 4.0)
    life = Life(plan, tmp_path)
    begun: list[set[str]] = []

    def count(event: Event) -> None:
        begun.append({request.trajectory_id[:6] for request in life.sampler.requests})

    life.bus.subscribe(count, kinds=(VersionCommitted,))
    life.play()
    assert life.steps[0].n > 2
    assert len(begun[0]) <= (2 + 1) * plan.groups_per_step
    assert life.steps[-1].n == 8


class _Half(ScriptedSampler):
    """Answers with 7 tokens and no end."""

    def __init__(self) -> None:
        super().__init__(seconds=lambda request: 1.0, tokens=lambda request: [300] * 7)


def test_a_used_budget_stays_used(tmp_path: Path) -> None:
    """After 7 of 10 tokens the next request asks for 3, also in another process."""
    budget = rl.Budget(max_turn_tokens=10, segment_tokens=7, max_turns=1)
    plan = replace(PLAN, turns=1, engine={"budget": budget}, rollout_every=0.3)

    def life() -> Life:
        one = Life(plan, tmp_path)
        one.sampler = _Half()
        one.engine.policy._sampler = as_backend(one.sampler)
        return one

    assert life().play(1.4)
    second = life()
    second.play(0.9)
    assert {request.max_new_tokens for request in second.sampler.requests} == {3}


class _Flaky(Chat):
    async def reset(self, row: Row) -> list[Message]:
        if row == 1:
            raise rl.InfrastructureError("the sandbox is gone")
        return await super().reset(row)


def test_retries_are_counted_over_processes(tmp_path: Path) -> None:
    """A member that was tried once before the stop is tried once after it, and then its group is given up."""
    rules = rl.Failures(member_retries=1, group_rerolls=0, retry_delay=5.0, consecutive=50)
    plan = replace(PLAN, steps=2, engine={"failures": rules}, rollout_every=0.3)

    def life() -> Life:
        one = Life(plan, tmp_path)
        one.engine.factory = rl.rollout.env.env_factory(lambda: _Flaky(one))  # type: ignore[attr-defined]
        return one

    first = life()
    assert first.play(1.0)
    second = life()
    second.play()
    attempts = [
        (event.group, event.member, event.attempt) for event in (*first.of(MemberFailed), *second.of(MemberFailed))
    ]
    ones = [attempt for group, member, attempt in attempts if (group, member) == (1, 0)]
    assert ones == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 1}, "max_staleness is 1, but was 0"),
        ({"group_size": 3}, "group_size is 3, but was 2"),
        ({"engine": {"temperature": 0.5}}, "temperature is 0.5, but was 1.0"),
        ({"engine": {"seed": 3}}, "seed is 3, but was 0"),
        ({"engine": {"budget": rl.Budget(max_turns=3)}}, "budget.max_turns is 3, but was 8"),
        ({"trainer": {**PLAN.trainer, "loss": CISPO(eps_max=2.0)}}, "loss.eps_max is 2.0, but was "),
    ],
)
def test_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """By the name of what differs, with both values; the state stays as it was."""
    _stopped(PLAN, tmp_path, 7.0)
    with pytest.raises(ConfigError, match="has the state of another run") as raised:
        _resumed(PLAN, tmp_path, **changes)
    assert message in str(raised.value)
    assert _resumed(PLAN, tmp_path).learner.parameters == _parameters(PLAN)


def test_harmless_changes_are_allowed(tmp_path: Path) -> None:
    """More steps, another concurrency, other retries and deadlines."""
    _stopped(PLAN, tmp_path, 7.0)
    changes = {"failures": rl.Failures(member_retries=3), "environment_timeout": 9.0}
    life = _resumed(PLAN, tmp_path, steps=6, concurrency=3, engine=changes, weights_every=3, rollout_every=5.0)
    assert life.steps[-1].n == 6


def test_a_schedule_that_is_stretched_says_so(tmp_path: Path) -> None:
    """More steps are another cosine for the steps to come; those that were taken keep theirs."""

    def life(steps: int) -> Life:
        one = Life(replace(PLAN, steps=steps), tmp_path)
        one.trainer = replace(one.trainer, optimizer=rl.Adam(lr=1.0, schedule=rl.cosine()))
        return one

    assert life(4).play(7.0)
    longer = life(8)
    longer.play()
    [notice] = [notice for notice in longer.of(Notice) if notice.name == "schedule_stretched"]
    assert (notice.keys["steps_before"], notice.keys["steps"]) == (4, 8)
    assert notice.keys["lr"] == longer.steps[0].metrics["optimizer/lr"]
    assert notice.keys["lr_before"] == pytest.approx(0.5)


def test_a_directory_has_one_run_at_a_time(tmp_path: Path) -> None:
    """The second is refused at once, and says which process has it."""

    async def both() -> None:
        async for _ in Life(PLAN, tmp_path).trainer.run([1, 2], steps=2):
            with pytest.raises(ConfigError, match=f"another run is using \\(process {os.getpid()}\\)"):
                await anext(Life(PLAN, tmp_path).trainer.run([1, 2], steps=2))
            break

    run_virtual(both)


def test_a_step_that_is_refused_leaves_its_batch_and_a_state(tmp_path: Path) -> None:
    """A gradient that is not finite ends the run; the step is taken again once its cause is mended."""
    life = Life(PLAN, tmp_path)
    life.learner.fail_at = 2
    with pytest.raises(NonFiniteError, match="nan") as raised:
        life.play()
    [refused] = (tmp_path / "refused").iterdir()
    assert refused.name == "000002.safetensors"
    assert raised.value.__notes__ == [f"its batch is in {refused}"]
    assert life.learner.pending == []
    mended = _resumed(PLAN, tmp_path)
    assert [step.n for step in mended.steps] == [2, 3, 4]
    assert mended.learner.parameters == _parameters(PLAN)


@pytest.mark.parametrize("seconds", [0.2, 7.2, 13.2])
def test_evaluations_are_neither_lost_nor_repeated(tmp_path: Path, seconds: float) -> None:
    """Before the first step, after every second one, after the last; one that was cut off is made again."""
    plan = replace(PLAN, heldout=2)
    lives = [Life(plan, tmp_path)]
    lives[0].play(seconds)
    lives.append(_resumed(plan, tmp_path))
    finished = [event.version for life in lives for event in life.of(EvaluationFinished)]
    assert finished == [0, 2, 4]


def test_signals_end_the_loop_over_the_steps(tmp_path: Path) -> None:
    """The first one: the loop ends as if the run were over, the state is saved, and the run can go on."""
    plan = replace(
        PLAN, steps=100, sampling_s=lambda request: 0.0, tool_s=0.0, train_s=0.0, step_s=0.0, publication_s=0.0
    )

    async def live(life: Life, stop_at: int) -> None:
        async for step in life.trainer.run([1, 2, 3], steps=stop_at or 100):
            life.steps.append(step)
            if len(life.steps) == 3 and not stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0)

    def life() -> Life:
        one = Life(plan, tmp_path)
        one.trainer = replace(one.trainer, checkpointing=rl.Checkpointing(tmp_path, on_signal=("SIGTERM",)))
        return one

    first = life()
    anyio.run(live, first, 0)
    assert 3 <= len(first.steps) < 100
    assert [notice.keys for notice in first.of(Notice) if notice.name == "stopping"] == [{"signal": "SIGTERM"}]
    last = first.steps[-1].n
    second = life()
    anyio.run(live, second, last + 3)
    assert [step.n for step in second.steps][-1] == last + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_every": 0}, "checkpoint.weights_every is 0"),
        ({"rollout_every": 0.0}, "checkpoint.rollout_every is 0.0"),
        ({"on_signal": ("SIGKILL",)}, "checkpointing.on_signal is 'SIGKILL'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    """By name and value."""
    with pytest.raises(ConfigError, match=message):
        rl.Checkpointing("runs/x", **options)


class _Adopting(ScriptedPublisher):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[set[int]] = []

    async def adopt(self, versions: Iterable[int]) -> frozenset[int]:
        self.asked.append(set(versions))
        return await super().adopt(self.asked[-1])


def test_a_new_run_takes_nothing_over(tmp_path: Path) -> None:
    """Whatever stands in the folder for versions is not its own; only a resumed run tidies up there."""

    def life() -> tuple[Life, _Adopting]:
        one, publisher = Life(PLAN, tmp_path), _Adopting()
        one.engine.policy._publisher = publisher
        return one, publisher

    first, publisher = life()
    first.play(7.0)
    assert publisher.asked == []
    second, publisher = life()
    second.play()
    assert len(publisher.asked) == 1
