"""Batches of several updates, stopped and killed between any two of them: a step has happened whole, or not at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.checkpoint.journal import Journal
from tests.resume.runs import Life, Plan, assert_ages, entries, image
from tests.resume.test_kills import killed_before_each_write

PLAN = Plan(
    steps=3,
    groups_per_step=3,
    max_staleness=2,
    weights_every=1,
    turns=1,
    trainer={"batch_order": "admission", "minibatches": 3},
)
EPOCHS = replace(PLAN, trainer={"batch_order": "admission", "epochs": 3}, flat_rows=frozenset({1}))


def _parameters(plan: Plan) -> str:
    life = Life(plan, None)
    life.play()
    return life.learner.parameters


@pytest.mark.parametrize("plan", [PLAN, EPOCHS], ids=["minibatches", "epochs"])
def test_a_stop_between_updates_changes_no_parameter(tmp_path: Path, plan: Plan) -> None:
    """Parameters of half a step are never saved, long as repeating the updates before them may take."""
    plan = replace(plan, train_s=4.0, step_s=1.0, weights_every=100, rollout_every=1000.0)
    whole = _parameters(plan)
    stopped_after = []
    for seconds in (4.0, 7.5, 13.0, 23.5):
        directory = tmp_path / str(seconds)
        first = Life(plan, directory)
        assert first.play(seconds)
        stopped_after.append(first.learner.version)
        second = Life(plan, directory)
        second.play()
        assert second.learner.parameters == whole, seconds
        assert second.learner.version == 9
        assert {step.n for step in first.steps}.isdisjoint(step.n for step in second.steps)
        assert_ages(second)
    assert stopped_after == [0, 1, 2, 4], "between the updates of a batch, too"


def test_the_updates_of_a_step_are_repeated_together(tmp_path: Path) -> None:
    """With their parts, divisors and settings; the journal has each sequence once."""
    plan = replace(EPOCHS, weights_every=100)
    first = Life(plan, tmp_path)
    assert first.play(7.0)
    done = first.steps[-1].n
    journal = entries(tmp_path)
    assert [len(entry.updates) for entry in journal] == [3] * done
    for entry in journal:
        chunks = [entry.updates[number].chunks[0] for number in range(3)]
        assert list(chunks[0]) == list(chunks[1]) == list(chunks[2])
    second = Life(plan, tmp_path)
    second.play()
    assert second.steps[0].metrics["recovery/steps_replayed"] == 3.0 * done
    assert [list(step.versions) for step in (*first.steps, *second.steps)] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert second.learner.parameters == _parameters(plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PLAN, EPOCHS], ids=["minibatches", "epochs"])
def test_a_kill_before_any_write_changes_no_parameter(tmp_path: Path, plan: Plan) -> None:
    """Also where the journal of a batch is half written while its last update is made."""
    whole = Life(plan, tmp_path / "run")
    with killed_before_each_write(tmp_path / "run", tmp_path / "images") as images:
        whole.play()
    assert len(images) > 40
    for directory in images:
        life = Life(plan, directory)
        life.play()
        assert life.learner.parameters == whole.learner.parameters, directory
        assert life.learner.version == 9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_runs_that_sample_ahead_keep_their_rows_and_ages(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at some moments, and once set back to an older copy: each row once, and the bound at every update."""
    monkeypatch.setattr(Journal, "forget", lambda self, n: None)
    plan = replace(
        PLAN, steps=5, max_staleness=5 + seed % 3, weights_every=100, rollout_every=0.3, flat_rows=frozenset({2})
    )
    directory = tmp_path / "run"
    for attempt in range(12):
        life = Life(plan, directory)
        stopped = life.play(0.9 + 0.7 * attempt if attempt < 6 else None, seed=seed * 20 + attempt)
        assert_ages(life)
        assert all(env.closed == 1 for env in life.envs)
        if attempt == 3:
            image(directory, tmp_path / "copy")
        if attempt == 4:
            image(tmp_path / "copy", directory)
        if not stopped:
            break
    journal = entries(directory)
    consumed = Counter(one.group for entry in journal for one in entry.consumed)
    assert set(consumed.values()) == {1}
    assert sum(len(entry.updates) for entry in journal) == life.learner.version
