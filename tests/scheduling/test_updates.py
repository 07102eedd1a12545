"""Several updates a batch: each makes a version, and the bound on the age of a token holds at every one of them."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.events import VersionCommitted, VersionPublished
from asyncrl.testing import run_virtual
from asyncrl.training.minibatches import group_parts
from tests.scheduling.promises import assert_ages, assert_nothing_is_held, assert_nothing_is_lost, assert_promises
from tests.scheduling.runs import NEWEST, Run, Shape, drawn

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")

_FACTORS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(2, 2), (1, 4), (4, 1)]}
# Updates -> minibatches and epochs.


def _shape(seed: int, updates: int, max_staleness: int, **trainer: Any) -> Shape:
    draw = random.Random(f"{seed} {updates} {max_staleness}")
    minibatches, epochs = draw.choice(_FACTORS[updates])
    ahead = (max_staleness + 1) // updates - 1
    plain = drawn(seed, max_staleness=max_staleness, kv_cache=draw.choice([None, NEWEST]))
    return replace(
        plain,
        groups_per_step=max(minibatches, draw.choice([1, 2, 3])),
        steps=ahead + draw.choice([3, 4]),
        trainer={**plain.trainer, "minibatches": minibatches, "epochs": epochs, **trainer},
    )


@pytest.mark.parametrize("updates", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_run_keeps_every_promise_at_every_update(updates: int, seed: int) -> None:
    """For each bound that is possible: random durations, task orders, lags, and parts without a gradient."""
    for max_staleness in range(updates - 1, 2 * updates + 3):
        run = Run(_shape(seed, updates, max_staleness))
        assert_promises(run, run.play(seed))


@pytest.mark.parametrize("updates", [2, 3, 4])
def test_random_runs_go_to_the_limit(updates: int) -> None:
    """Some token is as old as the bound allows, so that the rule is not only safe but no stricter than it has to be."""
    for batches_ahead in (0, 1, 2):
        bound, oldest = (batches_ahead + 1) * updates - 1, 0
        for seed in range(16):
            run = Run(replace(_shape(seed, updates, bound), flat_rows=frozenset()))
            run.play(seed)
            oldest = max([oldest, *(age for trained in run.learner.trained for age in trained.ages)])
            if oldest == bound:
                break
        assert oldest == bound


def test_each_update_makes_a_version_and_the_last_is_published() -> None:
    """Versions between are committed together with the last, and no server ever holds them."""
    run = Run(Shape(max_staleness=5, groups_per_step=3, steps=4, trainer={"minibatches": 3, "epochs": 2}))
    run.play()
    assert [event.version for event in run.of(VersionCommitted)] == list(range(1, 25))
    assert [event.version for event in run.of(VersionPublished)] == [0, 6, 12, 18, 24]
    assert run.publisher.staged == [0, 6, 12, 18, 24]
    assert [step.model_step for step in run.steps] == [6, 12, 18, 24]
    assert [list(step.versions) for step in run.steps] == [list(range(n, n + 6)) for n in (1, 7, 13, 19)]
    assert {step.metrics["train/updated"] for step in run.steps} == {6.0}
    assert run.learner.version == 24


def test_updates_train_whole_groups_and_each_epoch_all_of_them() -> None:
    """Every sequence is trained in one part of each epoch, and the divisor of an update counts its own tokens."""
    run = Run(Shape(max_staleness=3, groups_per_step=4, steps=1, trainer={"minibatches": 2, "epochs": 2}))
    run.play()
    groups: dict[int, set[int]] = defaultdict(set)
    for trained in run.learner.trained:
        groups[trained.version].add(trained.group)
    assert [len(groups[version]) for version in range(4)] == [2, 2, 2, 2]
    assert groups[0] | groups[1] == groups[2] | groups[3] == {0, 1, 2, 3}
    tokens = [sum(int(sequence.mask.sum()) for sequence in batch) for batch in run.learner.batches]
    assert run.learner.divisors == tokens
    assert run.steps[0].metrics["train/active_tokens"] == sum(tokens) / 2
    assert run.steps[0].metrics["train/backward_chunks"] == 4


def test_parts_without_a_gradient_make_no_version() -> None:
    """Their groups are used up, and whatever was allowed with more versions stays so."""
    flat = frozenset({0, 1, 3})
    run = Run(
        Shape(max_staleness=3, groups_per_step=2, steps=5, flat_rows=flat, trainer={"minibatches": 2, "epochs": 1})
    )
    audit = run.play()
    assert_nothing_is_lost(run, audit)
    assert_ages(run)
    made = [len(step.versions) for step in run.steps]
    assert sum(made) == run.learner.version == run.steps[-1].model_step
    assert set(made) == {0, 1}


@pytest.mark.parametrize("seed", range(6))
def test_masked_spans_are_masked_for_each_update(seed: int) -> None:
    """What is young enough for the first update and too old for the second is trained by the first only."""
    shape = _shape(seed, 3, 3, stale_policy="mask_span", allow_trajectory_loss=True, batch_order="completion")
    run = Run(replace(shape, steps=8, publication_s=lambda: 2.5))
    run.play(seed)
    assert_ages(run)
    assert_nothing_is_held(run)


def test_masking_differs_between_updates_somewhere() -> None:
    """In some of these runs a member is trained by fewer updates than there are epochs."""
    partly = 0
    for seed in range(6):
        trainer = {"epochs": 3, "stale_policy": "mask_span", "allow_trajectory_loss": True}
        run = Run(replace(drawn(seed, max_staleness=7), steps=8, trainer=trainer, flat_rows=frozenset()))
        run.play(seed)
        times: dict[tuple[int, int], int] = defaultdict(int)
        for trained in run.learner.trained:
            times[trained.group, trained.member] += 1
        partly += sum(0 < count < 3 for count in times.values())
    assert partly > 0


def test_a_step_stopped_between_its_updates_has_not_happened() -> None:
    """The versions that were made are nobody's: nothing is committed, and the gradient is forgotten."""
    run = Run(Shape(max_staleness=2, steps=2, train_s=1.0, step_s=1.0, trainer={"epochs": 3}))
    # Sampling ends at 1; passes and optimizer steps take a second each.
    with pytest.raises(TimeoutError):
        _play_for(run, 4.5)
    assert run.learner.version == 2 - 1
    assert run.learner.pending == []
    assert run.of(VersionCommitted) == []
    assert run.steps == []


def _play_for(run: Run, seconds: float) -> None:
    async def play() -> None:
        with anyio.fail_after(seconds):
            await run.to_the_end()

    run_virtual(play)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"minibatches": 0}, "minibatches"),
        ({"epochs": 0}, "epochs"),
        ({"minibatches": 3}, "groups_per_step"),
        ({"epochs": 2, "max_staleness": 0}, "max_staleness of at least 1 (3 to sample while training)"),
        ({"epochs": 2, "max_staleness": 1, "forward_backward_batch": rl.ForwardBackwardBatch()}, "minibatches"),
    ],
)
def test_updates_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    """With what to change."""
    shape = Shape(max_staleness=options.pop("max_staleness", 2), trainer=options)
    with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace(")", r"\)")):
        Run(shape)


def test_early_chunks_are_off_by_themselves() -> None:
    """A synchronous run with several updates waits for the whole batch, which it divides."""
    run = Run(Shape(max_staleness=1, trainer={"epochs": 2}))
    assert run.trainer.overlap is None
    assert Run(Shape()).trainer.overlap is not None


@pytest.mark.parametrize(("groups", "minibatches"), [(5, 2), (2, 2), (1, 3), (0, 2), (7, 3)])
def test_parts_are_even_shuffled_and_repeatable(groups: int, minibatches: int) -> None:
    """Each group once an epoch, sizes that differ by at most one, and the same parts for the same step."""
    parts = list(group_parts(groups, minibatches=minibatches, epochs=3, n=4))
    assert parts == list(group_parts(groups, minibatches=minibatches, epochs=3, n=4))
    assert len(parts) == 3 * minibatches
    for epoch in range(3):
        mine = parts[epoch * minibatches : (epoch + 1) * minibatches]
        assert sorted(position for part in mine for position in part) == list(range(groups))
        assert max(map(len, mine)) - min(map(len, mine)) <= 1
    if groups > 4:
        assert parts[:minibatches] != parts[minibatches : 2 * minibatches]
    assert list(group_parts(groups, minibatches=1, epochs=1, n=1)) == [list(range(groups))]
