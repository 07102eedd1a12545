"""A run that is saved at any event, killed at any later one and resumed, in every completion mode."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncrl as rl
from asyncrl.checkpoint.journal import Journal
from asyncrl.errors import ObserverError
from asyncrl.events import (
    DeadlinePassed,
    Event,
    GroupConsumed,
    MemberDiscarded,
    MemberFailed,
    MemberFinished,
    Notice,
    VersionPublished,
)
from asyncrl.rollout.env import env_factory
from asyncrl.rollout.groupplan import GroupPlan
from asyncrl.rollout.progress import GroupProgress
from asyncrl.testing import run_virtual
from asyncrl.training.record import RunRecord
from asyncrl.training.saving import RunSaver
from asyncrl.types import DropReason, Group, Message, Row, Span, SpanKind, Trajectory, TruncationCause
from tests.resume.runs import Chat, Life, Plan, entries, image
from tests.scheduling.audit import watched

_SIZE = 4
_ACKNOWLEDGED = {"advantage": rl.Batchwise(), "stale_policy": "mask_span", "allow_trajectory_loss": True}


def _deadline(stragglers: Any, tokens: int) -> dict[str, Any]:
    completion = rl.GroupCompletion(
        mode="deadline", min_members=2, max_straggler_tokens=tokens, on_stragglers=stragglers
    )
    return {"completion": completion, **_ACKNOWLEDGED}


MODES: Mapping[str, dict[str, Any]] = {
    "wait": {"batch_order": "completion"},
    "truncate": _deadline("truncate", 4),
    "truncate in time": {**_deadline("truncate", 4), "advantage": rl.GroupCentered(), "stale_policy": "wait"},
    "discard": _deadline("discard", 4),
    "carry_over": _deadline("carry_over", 4),
    "carry_over at once": _deadline("carry_over", 0),
}


class _Chat(Chat):
    """The environment of a conversation that is cut has answered what was said so far."""

    async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
        if self.recovery == "snapshot":
            assert self._said == traj.turns - traj.awaiting_reply
        return float(traj.member)


def _life(plan: Plan, directory: Path) -> Life:
    life = Life(plan, directory)
    life.engine.factory = env_factory(partial(_Chat, life))
    return life


def _plan(mode: str, recovery: str, seed: int) -> Plan:
    """Members of very different speed, so that each group has a quorum long before its end."""
    draw = random.Random(seed)
    slow = draw.sample([0.1, 0.2, 0.6, 1.1], _SIZE)
    return Plan(
        steps=3,
        group_size=_SIZE,
        max_staleness=draw.choice([1, 2]),
        turns=3,
        weights_every=100,
        rollout_every=1000.0,  # saved at events only
        tool_s=0.1,
        train_s=draw.choice([0.0, 0.3]),
        concurrency=draw.choice([5, 64]),
        sampling_s=lambda request: slow[int(request.trajectory_id[-1])],
        recovery=recovery,
        trainer=MODES[mode],
    )


def _played(plan: Plan, folder: Path, wanted: Container[int]) -> tuple[Life, int]:
    """Play a run; after each ``wanted`` event its state is saved, and what a kill would leave then is kept.

    Also returns how many events there were.
    """
    life = _life(plan, folder / "run")
    count = itertools.count()
    events = 0

    def save() -> None:
        nonlocal events
        events = next(count)
        if events in wanted and captures:
            checkpoints[0]._save(captures[0].state())
            image(folder / "run", folder / f"{events}")

    def soon(event: Event) -> None:
        # In the next pass of the loop: what happens at once happens as a whole.
        asyncio.get_running_loop().call_soon(save)

    with watched(RunRecord) as captures, watched(RunSaver) as checkpoints:
        life.bus.subscribe(soon)
        life.play()
    return life, events


def _killed(saved: Path, later: Path, copy: Path) -> Path:
    """What is left by a kill at ``later`` if the newest snapshot is that of ``saved``."""
    shutil.copytree(saved, copy)
    shutil.copytree(later / "journal", copy / "journal", dirs_exist_ok=True)
    return copy


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole journal stays, and disks need not be waited for."""
    monkeypatch.setattr(Journal, "forget", lambda self, n: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("recovery", ["stateless", "snapshot", "drop"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_resumed_from_any_event_without_a_member_lost(tmp_path: Path, mode: str, recovery: str) -> None:
    """Also where the snapshot is older than the deadline and the step that consumed a part of the group: no member
    fails, none is trained twice, and every row ends whole."""
    seed = len(mode) * 3 + len(recovery)
    plan = _plan(mode, recovery, seed)
    whole, events = _played(plan, tmp_path / "whole", ())
    assert bool(whole.of(DeadlinePassed)) == (mode != "wait")
    draw = random.Random(seed)
    firsts = [draw.randrange(5, events) for _ in range(9)]
    kills = [(first, min(draw.choice([first, first + draw.randrange(30), events]), events)) for first in firsts]
    _played(plan, tmp_path / "saved", {event for kill in kills for event in kill})
    for number, (first, later) in enumerate(kills):
        directory = _killed(tmp_path / f"saved/{first}", tmp_path / f"saved/{later}", tmp_path / f"killed-{number}")
        life = _life(replace(plan, steps=plan.steps + 1), directory)
        life.play(seed=number)
        _assert_whole(life, directory, mode)


def _assert_whole(life: Life, directory: Path, mode: str) -> None:
    assert [event.error for event in life.of(MemberFailed)] == []
    journal = entries(directory)
    assert [entry.n for entry in journal] == list(range(1, life.plan.steps + 1))
    members = Counter((one.group, member) for entry in journal for one in entry.consumed for member in one.members)
    assert set(members.values()) == {1}
    final = Counter(one.group for entry in journal for one in entry.consumed if one.final)
    assert set(final.values()) <= {1}
    if mode != "discard":
        assert Counter(group for group, _ in members if group in final) == dict.fromkeys(final, _SIZE)
    for kind in (MemberFinished, MemberDiscarded):
        assert set(Counter((event.group, event.member) for event in life.of(kind)).values()) <= {1}
    reasons = {reason for event in life.of(GroupConsumed) for reason in event.dropped}
    assert reasons <= ({DropReason.STRAGGLER} if mode.startswith(("truncate", "discard")) else set())


async def _gone_on(directory: Path, progress: GroupProgress, recovery: str) -> tuple[Life, Group]:
    life = _life(_plan("wait", recovery, 0), directory)
    async with life.engine.opened(life.bus) as session:
        await session.publish(0)
        group = await session.group(0, 0, 2, progress=progress)
    assert isinstance(group, Group)
    return life, group


@pytest.mark.parametrize("recovery", ["stateless", "snapshot", "drop"])
@pytest.mark.parametrize(("reward", "dropped"), [(0.5, None), (None, DropReason.STRAGGLER)])
def test_a_member_that_had_ended_is_neither_sampled_nor_graded_again(
    tmp_path: Path, reward: float | None, dropped: DropReason | None, recovery: str
) -> None:
    """It was saved while its environment was being closed."""
    ended = GroupPlan(index=0, row=0, size=2, seed=0).member(0)
    ended.append(Span(kind=SpanKind.PROMPT, tokens=np.array([1], dtype=np.int32)))
    ended.over, ended.reward, ended.dropped = True, reward, dropped
    progress = GroupProgress(active={0: ended})
    life, group = run_virtual(partial(_gone_on, tmp_path, progress, recovery))
    assert group.members_G[0] is ended
    assert ended.reward == reward
    assert {request.trajectory_id for request in life.sampler.requests} == {"000000-001"}


class _SomeDropped(_Chat):
    """A row whose reset never works is dropped."""

    async def reset(self, row: Row) -> list[Message]:
        if row == 2:
            raise KeyError("no such file")
        return await super().reset(row)


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("flat", [frozenset[int](), frozenset({0, 1})])
@pytest.mark.parametrize("kind", [kind for kind in Event.__subclasses__() if kind not in (Notice, VersionPublished)])
def test_an_observer_that_raises_ends_the_run_and_not_its_state(
    tmp_path: Path, kind: type[Event], flat: frozenset[int]
) -> None:
    """At whatever event it raises: the run can be resumed, and each row is consumed once."""
    plan = Plan(steps=3, weights_every=100, flat_rows=flat, trainer=MODES["wait"])
    lives = [Life(plan, tmp_path / "run") for _ in range(2)]
    for life in lives:
        life.engine.factory = env_factory(partial(_SomeDropped, life))
    seen = itertools.count()

    def raises(event: Event) -> None:
        if next(seen) == 1:
            raise KeyError("a bug of a user")

    lives[0].bus.subscribe(raises, kinds=(kind,))
    with suppress(ObserverError):
        lives[0].play()
    lives[1].play()
    journal = entries(tmp_path / "run")
    assert [entry.n for entry in journal] == [1, 2, 3]
    assert set(Counter(one.group for entry in journal for one in entry.consumed).values()) == {1}
