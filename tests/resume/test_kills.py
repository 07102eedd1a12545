"""A run that is killed anywhere, resumed, and killed again: nothing is lost and nothing happens twice."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.checkpoint.journal import Journal
from asyncrl.testing import VirtualClock
from tests.resume.runs import Life, Plan, assert_ages, entries, image

ASYNCHRONOUS = Plan(steps=4, max_staleness=1, weights_every=100, trainer={}, flat_rows=frozenset({2}))


@pytest.fixture
def whole_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose entries are not needed any more stay, so that all of them can be looked at in the end."""
    monkeypatch.setattr(Journal, "forget", lambda self, n: None)


@contextmanager
def killed_before_each_write(directory: Path, images: Path) -> Iterator[list[Path]]:
    """Keep what a process leaves that is killed just before it flushes, renames or removes something."""
    kept: list[Path] = []

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            kept.append(image(directory, images / f"{len(kept):04d}"))
            return original(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        # What is flushed is in the copy already, and a disk need not be waited for.
        patch.setattr(os, "fsync", watch(lambda descriptor: None))
        for name in ("rename", "unlink"):
            patch.setattr(os, name, watch(getattr(os, name)))
        yield kept
    kept.append(image(directory, images / f"{len(kept):04d}"))


def _images(plan: Plan, folder: Path) -> tuple[Life, list[Path]]:
    life = Life(plan, folder / "run")
    with killed_before_each_write(folder / "run", folder / "images") as images:
        life.play()
    return life, images


@pytest.mark.slow
@pytest.mark.parametrize("recovery", ["stateless", "snapshot", "drop"])
def test_a_kill_before_any_write_changes_no_parameter(tmp_path: Path, recovery: str) -> None:
    """Half a journal entry, half a snapshot, half saved weights: what is left gives the same run to the last bit."""
    plan = Plan(steps=3, weights_every=2, recovery=recovery)
    whole, images = _images(plan, tmp_path)
    assert len(images) > 60
    for directory in images[:: 1 if recovery == "stateless" else 3]:
        life = Life(plan, directory)
        life.play()
        assert life.learner.version == plan.steps
        assert life.learner.parameters == whole.learner.parameters, directory


@pytest.mark.slow
@pytest.mark.usefixtures("whole_journal")
def test_a_kill_before_any_write_loses_and_repeats_no_row(tmp_path: Path) -> None:
    """With a bound of 1 the schedule differs after a resume, but each group is still consumed once."""
    whole, images = _images(ASYNCHRONOUS, tmp_path)
    for directory in images:
        life = Life(ASYNCHRONOUS, directory)
        life.play()
        journal = entries(directory)
        assert [entry.n for entry in journal] == list(range(1, ASYNCHRONOUS.steps + 1))
        consumed = Counter(consumed.group for entry in journal for consumed in entry.consumed)
        assert set(consumed.values()) == {1}
        assert sum(consumed.values()) == ASYNCHRONOUS.steps * ASYNCHRONOUS.groups_per_step
        assert_ages(life)
    assert whole.learner.version >= ASYNCHRONOUS.steps - 1


def _plan(seed: int, max_staleness: int) -> Plan:
    draw = random.Random(seed)
    newest = {"sampling_policy": "segment", "kv_cache": rl.KVCache(on_limit="refill", allow_reprefill=True)}
    policy: dict[str, Any] = draw.choice([{}, newest]) if max_staleness else {}
    return Plan(
        steps=max_staleness + draw.choice([2, 3, 4]),
        groups_per_step=draw.choice([1, 2, 3]),
        max_staleness=max_staleness,
        turns=draw.choice([1, 2, 3]),
        recovery=draw.choice(["stateless", "snapshot", "drop"]),
        weights_every=100,
        rollout_every=draw.choice([0.3, 0.7, 2.0]),
        flat_rows=frozenset(draw.sample(range(7), draw.choice([0, 2]))),
        broken_rows=frozenset(draw.sample(range(7), draw.choice([0, 0, 1]))),
        concurrency=draw.choice([1, 3, 64]),
        publication_s=draw.choice([0.1, 0.4, 2.0]),
        train_s=draw.choice([0.0, 0.3, 1.0]),
        engine=policy,
        trainer={"batch_order": draw.choice(["completion", "admission"])},
    )


@contextmanager
def _killed_once(directory: Path, copy: Path, write: int) -> Iterator[None]:
    """Keep what is left by a kill before the write of that number, or at the end if there are not so many."""
    left = write

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                image(directory, copy)
            return original(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", watch(lambda descriptor: None))
        for name in ("rename", "unlink"):
            patch.setattr(os, name, watch(getattr(os, name)))
        yield
    if left > 0:
        image(directory, copy)


def _survive(plan: Plan, directory: Path, draw: random.Random) -> list[Life]:
    """Kill, resume and stop until the run is over. A kill is a copy of the folder from some write of a life."""
    lives: list[Life] = []
    for attempt in range(12):
        life = Life(plan, directory / "run")
        kills = draw.random() < 0.5
        with _killed_once(directory / "run", directory / "image", draw.randrange(5, 60)):
            stopped = life.play(draw.uniform(0.2, 6.0) if attempt < 8 else None, seed=draw.randrange(1000))
        lives.append(life)
        if kills and attempt < 8:
            image(directory / "image", directory / "run")
        elif not stopped:
            break
    return lives


@pytest.mark.slow
@pytest.mark.usefixtures("whole_journal")
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(50))
def test_a_run_survives_any_kills_and_stops(tmp_path: Path, seed: int, max_staleness: int) -> None:
    """Random shapes, moments, task orders and recovery modes: rows exactly once, ages within the bound, the capacity
    of one run."""
    plan = _plan(seed, max_staleness)
    lives = _survive(plan, tmp_path, random.Random(seed))
    journal = entries(tmp_path / "run")
    assert [entry.n for entry in journal] == list(range(1, plan.steps + 1))
    consumed = Counter(one.group for entry in journal for one in entry.consumed)
    dropped = {group for entry in journal for group, _ in entry.dropped}
    assert set(consumed.values()) == {1}
    assert sum(consumed.values()) == plan.steps * plan.groups_per_step
    assert not dropped & consumed.keys()
    assert all(group % 7 in plan.broken_rows for group in dropped)
    # Nothing younger was preferred for good: what is missing below the newest is outstanding, and no more than fits.
    missing = set(range(max(consumed))) - consumed.keys() - dropped
    assert len(missing) <= (1 + max_staleness) * plan.groups_per_step
    for life in lives:
        assert_ages(life)
        assert life.sampler.in_flight == 0
        assert all(env.closed == 1 for env in life.envs)
    assert not +lives[-1].publisher.holders


@pytest.mark.slow
@pytest.mark.usefixtures("whole_journal")
@pytest.mark.parametrize("stragglers", ["truncate", "discard", "carry_over"])
@pytest.mark.parametrize("seed", range(8))
def test_groups_with_a_deadline_survive_kills_and_stops(tmp_path: Path, seed: int, stragglers: Any) -> None:
    """Members that were carried over or have left, and deadlines that had passed, stay so: each member at most once,
    and every group to its end."""
    completion = rl.GroupCompletion(mode="deadline", min_members=2, max_straggler_tokens=4, on_stragglers=stragglers)
    plan = Plan(
        steps=4,
        group_size=4,
        max_staleness=1,
        turns=4,
        weights_every=100,
        tool_s=0.1,
        sampling_s=lambda request: 0.2 + 0.9 * (int(request.trajectory_id[-1]) == 3),
        recovery=("stateless", "snapshot", "drop")[seed % 3],
        trainer={
            "completion": completion,
            "advantage": rl.Batchwise(),
            "stale_policy": "mask_span",
            "allow_trajectory_loss": True,
        },
    )
    _survive(plan, tmp_path, random.Random(seed))
    journal = entries(tmp_path / "run")
    assert [entry.n for entry in journal] == list(range(1, plan.steps + 1))
    members = Counter((one.group, member) for entry in journal for one in entry.consumed for member in one.members)
    assert set(members.values()) == {1}
    if stragglers == "carry_over":
        assert [sum(len(one.members) for one in entry.consumed) for entry in journal] == [8] * plan.steps
    final = Counter(one.group for entry in journal for one in entry.consumed if one.final)
    assert set(final.values()) <= {1}
    if stragglers == "truncate":
        assert len(members) == 4 * len(final)


class _StrikingClock(VirtualClock):
    """Calls ``strike`` before the pass number ``at`` after it was set."""

    def __init__(self, at: int, seed: int) -> None:
        super().__init__(seed=seed)
        self._left = at
        self.strike: Callable[[], object] | None = None

    def _run_once(self) -> None:
        if self.strike is not None:
            self._left -= 1
            if not self._left:
                self.strike()
        super()._run_once()


async def _until_struck(life: Life) -> bool:
    clock = asyncio.get_running_loop()
    assert isinstance(clock, _StrikingClock)
    with anyio.CancelScope() as scope:
        clock.strike = scope.cancel
        await life.live()
    return scope.cancel_called


@pytest.mark.slow
@pytest.mark.parametrize("recovery", ["stateless", "snapshot", "drop"])
def test_a_run_can_be_stopped_between_any_two_of_its_awaits(tmp_path: Path, recovery: str) -> None:
    """And resumed: the same parameters, and no step twice, wherever the cancellation came."""
    plan = Plan(steps=2, weights_every=1, recovery=recovery)
    whole = Life(plan, None)
    whole.play()
    at, struck = 1, True
    while struck:
        directory = tmp_path / str(at)
        first = Life(plan, directory)
        clock = partial(_StrikingClock, at, at)
        struck = anyio.run(_until_struck, first, backend_options={"loop_factory": clock})
        assert all(env.closed == 1 for env in first.envs)
        second = Life(plan, directory)
        second.play()
        assert second.learner.parameters == whole.learner.parameters, at
        assert {step.n for step in first.steps}.isdisjoint(step.n for step in second.steps)
        at += 1
    assert at > 100
