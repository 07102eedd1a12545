"""Groups that begin anew in a run that is killed: after any kill the state is that of a moment that was."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.checkpoint.journal import Journal
from asyncrl.checkpoint.state import Consumed, GroupState, JournalEntry, Renewed, RunState
from asyncrl.events import Event, GroupRerolled, Notice, StepFinished
from asyncrl.rollout.env import env_factory
from asyncrl.rollout.progress import GroupProgress
from asyncrl.scheduling.staleness import feasible
from asyncrl.types import Message, Row, Trajectory
from tests.resume.runs import Chat, Life, Plan, assert_ages, entries, image

_RULES = rl.Failures(member_retries=0, group_rerolls=3, consecutive=1000, retry_delay=0.2)


class _Breaking(Chat):
    """On some rows the machinery fails in the middle of a conversation, after a long while."""

    broken: Mapping[Any, int]
    """Row -> attempts that fail."""
    after_s: float

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        if traj.attempt <= self.broken.get(traj.row, 0) and traj.member == 1:
            await anyio.sleep(self.after_s)
            raise rl.InfrastructureError("the sandbox is gone")
        return await super().on_turn(traj)


def _life(plan: Plan, directory: Path | None, broken: dict[Row, int], after_s: float) -> Life:
    life = Life(plan, directory)
    env = type("Breaking", (_Breaking,), {"broken": broken, "after_s": after_s})
    life.engine.factory = env_factory(partial(env, life))
    return life


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole journal stays, and disks need not be waited for."""
    monkeypatch.setattr(Journal, "forget", lambda self, n: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _images(life: Life, folder: Path) -> list[Path]:
    """What a kill leaves at each event that frees or binds the barrier."""
    images: list[Path] = []
    kinds = ("GroupBorn", "GroupRerolled", "GroupFinished", "GroupDropped", "VersionCommitted", "VersionPublished")

    def keep(event: Event) -> None:
        if type(event).__name__ in kinds and life.directory is not None:
            images.append(image(life.directory, folder / f"{len(images):04d}"))

    life.bus.subscribe(keep)
    life.play()
    return images


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_reroll_between_a_save_and_a_kill_is_not_forgotten(tmp_path: Path, max_staleness: int, seed: int) -> None:
    """Whenever the barrier was freed by it: the resumed run ends, no row is lost or repeated, no bound is broken."""
    draw = random.Random(seed)
    plan = Plan(
        steps=max_staleness + 3,
        groups_per_step=draw.choice([1, 2]),
        max_staleness=max_staleness,
        recovery=("stateless", "snapshot", "drop")[seed % 3],
        weights_every=100,
        rollout_every=draw.choice([0.9, 2.0, 3.1]),
        engine={"failures": _RULES},
        trainer={"batch_order": draw.choice(["completion", "admission"])},
    )
    broken: dict[Row, int] = {0: 1, draw.choice([1, 2, 3]): draw.choice([1, 2])}
    after_s = draw.choice([1.3, 3.0, 5.0])
    whole = _life(plan, tmp_path / "run", broken, after_s)
    images = _images(whole, tmp_path / "images")
    assert whole.of(GroupRerolled)
    for directory in images[draw.randrange(3) :: 3]:
        life = _life(replace(plan, rollout_every=99.0), directory, broken, after_s)
        life.play()
        journal = entries(directory)
        assert [entry.n for entry in journal] == list(range(1, plan.steps + 1))
        consumed = Counter(one.group for entry in journal for one in entry.consumed)
        assert set(consumed.values()) == {1}
        assert sum(consumed.values()) == plan.steps * plan.groups_per_step
        assert_ages(life)
        assert not [notice for notice in life.of(Notice) if notice.name == "group_begun_anew"]
        assert all(step.metrics["recovery/groups_begun_anew"] == 0.0 for step in life.steps)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("forgetful", [False, True])
@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_a_reroll_that_opened_the_barrier_is_known_after_a_kill(
    tmp_path: Path, max_staleness: int, forgetful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt of the oldest group is in the only snapshot; then it fails, and as many versions are made as
    it would have been too old for. A journal that does not know it costs what the group had, and not the run."""
    plan = Plan(
        steps=max_staleness + 4,
        groups_per_step=1,
        max_staleness=max_staleness,
        weights_every=100,
        rollout_every=5.0,
        engine={"failures": _RULES},
        trainer={},
    )
    first = _life(plan, tmp_path / "run", {0: 1}, 6.0)

    def kill(event: Event) -> None:
        if isinstance(event, StepFinished) and event.model_step == max_staleness + 1:
            image(tmp_path / "run", tmp_path / "killed")

    first.bus.subscribe(kill)
    first.play()
    if forgetful:
        monkeypatch.setattr(RunState, "_renew", lambda self, start: None)
    life = _life(replace(plan, rollout_every=99.0), tmp_path / "killed", {0: 1}, 6.0)
    life.play()
    assert life.steps[0].metrics["recovery/groups_begun_anew"] == float(forgetful)
    assert len([notice for notice in life.of(Notice) if notice.name == "group_begun_anew"]) == forgetful
    assert [entry.n for entry in entries(tmp_path / "killed")] == list(range(1, plan.steps + 1))
    assert_ages(life)


_DUES = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=9)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_DUES, st.integers(0, 3), st.integers(1, 3))
def test_what_cannot_be_trained_in_time_begins_anew(
    dues: list[tuple[int, bool]], version: int, groups_per_step: int
) -> None:
    """Whatever a state claims, the barrier's rule holds of what is kept; and nothing begins anew without need."""

    def state() -> RunState:
        groups = {
            index: GroupState(
                index=index, due=due, taken={0} if taken else set(), progress=GroupProgress(at_quorum={0: 2})
            )
            for index, (due, taken) in enumerate(dues)
        }
        return RunState(version=version, admitted=len(dues), groups=groups)

    after = state()
    late = len(after.begin_late_anew(groups_per_step=groups_per_step))
    kept = Counter(group.due for group in after.groups.values() if group.due is not None)
    assert feasible(kept, version=version, groups_per_step=groups_per_step)
    assert late == len(dues) - kept.total()
    before = Counter(due for due, _ in dues)
    assert (late == 0) == feasible(before, version=version, groups_per_step=groups_per_step)
    for late_group in after.groups.values():
        if late_group.due is None:
            assert late_group.renewed is not None
            taken = late_group.taken
            begun = GroupProgress(removed=taken, part_handed_over=bool(taken), deadline_passed=bool(taken))
            assert late_group.progress == begun


@pytest.mark.parametrize(("known", "number"), [(None, 1), (1, 1), (1, 2), (2, 1), (3, 3)])
def test_a_new_start_is_applied_once(known: int | None, number: int) -> None:
    """A snapshot of after it has it already; one of before it gives up what it has, but for what was consumed."""

    def start(number: int) -> Renewed:
        return Renewed(group=0, number=number, rerolls=number, attempts=((0, number), (1, number)))

    before = None if known is None else start(known)
    saved = GroupState(index=0, due=1, renewed=before, progress=GroupProgress(at_quorum={0: 1}))
    state = RunState(admitted=2, groups={0: saved, 1: GroupState(index=1, due=1)})
    consumed = (Consumed(group=1, members=(0, 1), final=True),)
    state.apply(JournalEntry(n=1, version=0, admitted=2, consumed=consumed, renewed=(start(number),), rerolled=4))
    group = state.groups[0]
    if known is not None and known >= number:
        assert (group.due, group.renewed, group.progress) == (1, before, GroupProgress(at_quorum={0: 1}))
    else:
        assert (group.due, group.renewed) == (None, start(number))
        assert group.progress == GroupProgress(rerolls=number, attempts=Counter({0: number, 1: number}))
    assert state.totals.rerolled == 4
