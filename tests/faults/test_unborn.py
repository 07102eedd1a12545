"""Groups that end before any of their requests was dispatched: too long a prompt, or no reset that works.

They have no age. They are truncated or dropped by the run's own rules, wherever the group may be at that moment.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.checkpoint.journal import Journal
from asyncrl.events import EvaluationFinished, Events, GroupBorn, GroupConsumed, GroupDropped, Notice
from asyncrl.learning.base import TrainingSequence
from asyncrl.rollout.env import env_factory
from asyncrl.testing import ScriptedSampler, run_virtual, scripted_policy
from asyncrl.training.saving import RunSaver
from asyncrl.types import Group, Message, Row, Trajectory, TruncationCause
from tests.faults.case import AGAIN, Case, HermesRenderer, One
from tests.resume.runs import Chat, Life, Plan, consumed_rows, entries

_CONTEXT = 20
_BUDGET = rl.Budget(max_context_tokens=_CONTEXT)
_PROMPTS = {"short": 5, "one left": _CONTEXT - 1, "full": _CONTEXT, "over": _CONTEXT + 1, "far over": 9 * _CONTEXT}
_UNBORN = ("full", "over", "far over", "half broken")

_ACKNOWLEDGED = {"stale_policy": "mask_span", "allow_trajectory_loss": True}
_MODES: dict[str, dict[str, Any]] = {
    "overlap": {"forward_backward_batch": "auto"},
    "wait": {"forward_backward_batch": None},
    "truncate": {"completion": rl.GroupCompletion(mode="deadline", max_straggler_tokens=0), **_ACKNOWLEDGED},
    "discard": {
        "completion": rl.GroupCompletion(mode="deadline", max_straggler_tokens=0, on_stragglers="discard"),
        **_ACKNOWLEDGED,
    },
    "carry_over": {
        "completion": rl.GroupCompletion(mode="deadline", max_straggler_tokens=0, on_stragglers="carry_over"),
        "advantage": rl.Batchwise(),
        **_ACKNOWLEDGED,
    },
}


class _Rows(One):
    """What a row is decides how long its prompt is, or whether reset works at all."""

    kinds: tuple[str, ...] = ()

    def kind(self, row: Row) -> str:
        """Of that row."""
        return self.kinds[row]

    async def reset(self, row: Row) -> list[Message]:
        kind = self.kind(row)
        await anyio.sleep(row)
        if kind == "broken" or (kind == "half broken" and self.opened % 2):
            raise KeyError("no such file")
        return [{"role": "user", "content": "x" * _PROMPTS.get(kind, 5 * _CONTEXT)}]

    opened = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).opened += 1
        self.opened = type(self).opened


def _rows(kinds: tuple[str, ...]) -> type[_Rows]:
    return type("Rows", (_Rows,), {"kinds": kinds, "open": 0, "opened": 0})


def _assert_accounted(case: Case, kinds: tuple[str, ...]) -> None:
    """Each row as it should be; whoever never sampled is named once, and had no birth and no gradient."""
    case.assert_exactly_once()
    born = {event.group for event in case.of(GroupBorn)}
    named = Counter(notice["group"] for notice in case.notices("row_not_sampled"))
    consumed = {event.group for event in case.of(GroupConsumed)}
    assert set(named.values()) <= {1}
    assert {group for group in consumed if kinds[group % len(kinds)] in _UNBORN} <= named.keys()
    assert all(kinds[int(str(group)) % len(kinds)] in _UNBORN for group in named)
    assert {kinds[event.group % len(kinds)] for event in case.of(GroupDropped)} <= {"broken", "half broken"}
    for step in case.steps:
        for traj in step.trajectories:
            kind = kinds[traj.group % len(kinds)]
            assert (traj.group in born) == (kind not in _UNBORN)
            assert (traj.truncated is TruncationCause.CONTEXT) == (traj.error is None and kind != "short")
    assert all(_trains_something(sequence) for batch in case.learner.batches for sequence in batch)


def _trains_something(sequence: TrainingSequence) -> bool:
    return bool(sequence.mask.any())


@pytest.mark.slow
@pytest.mark.parametrize("mode", _MODES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from([*_PROMPTS, "broken", "half broken"]), max_size=4),
    max_staleness=st.integers(0, 2),
    order=st.sampled_from(["completion", "admission"]),
    size=st.integers(2, 3),
    seed=st.integers(0, 99),
)
def test_a_group_that_never_samples_is_consumed_or_dropped(
    mode: str, kinds: list[str], max_staleness: int, order: str, size: int, seed: int
) -> None:
    """In every mode, order and bound, whatever rows come before and after it; the run goes on to its end."""
    rows = (*kinds, "short")
    options = dict(_MODES[mode])
    whole = "stale_policy" not in options
    if whole:
        options["batch_order"] = order
    case = Case(
        _rows(rows),
        sampler=ScriptedSampler(seconds=lambda request: 1.0),
        engine={"budget": _BUDGET, "failures": AGAIN, "schedule": rl.Schedule(concurrency=3)},
        group_size=size,
        max_staleness=max(max_staleness, int(mode == "carry_over")),
        **options,
    )
    case.play(4, len(rows), seed=seed)
    assert [step.n for step in case.steps] == [1, 2, 3, 4]
    if mode in ("overlap", "wait"):
        _assert_accounted(case, rows)
    members = Counter((traj.group, traj.member) for step in case.steps for traj in step.trajectories)
    assert set(members.values()) == {1}


def test_the_notice_says_what_a_person_needs() -> None:
    """Which row, why, and how long its prompt is; once for all of its members."""
    case = Case(_rows(("short", "over")), engine={"budget": _BUDGET}, group_size=3)
    case.play(1, 2)
    [keys] = case.notices("row_not_sampled")
    assert keys == {"group": 1, "row": "1", "truncated": {"context": 3}, "prompt_tokens": _CONTEXT + 1}


def test_a_part_may_be_ready_before_its_group_is_born() -> None:
    """Two members end without a request; at the first request of the others the deadline passes."""

    class Half(One):
        opened = 0

        async def reset(self, row: Row) -> list[Message]:
            Half.opened += 1
            late = row == 0 and Half.opened > 2
            await anyio.sleep(3.0 if late else 0.0)
            return [{"role": "user", "content": "x" * (5 if late or row else 99)}]

    case = Case(
        Half,
        sampler=ScriptedSampler(seconds=lambda request: 1.0),
        engine={"budget": _BUDGET, "schedule": rl.Schedule(concurrency=4)},
        group_size=4,
        max_staleness=1,
        groups_per_step=1,
        **_MODES["carry_over"],
    )
    case.play(4, 3)
    consumed = [event for event in case.of(GroupConsumed) if event.group == 0]
    assert [event.final for event in consumed] == [False, True]
    assert 0 in {event.group for event in case.of(GroupBorn)}


async def _rolled_out(engine: rl.RolloutEngine, events: Events, rows: int) -> list[Group]:
    return [group async for group in engine.rollout(list(range(rows)), group_size=2, events=events)]


def test_an_engine_alone_yields_it_and_names_the_row() -> None:
    """With its prompts and no token; a row that cannot be reset is reported as dropped."""
    events, seen = Events(), list[Any]()
    events.subscribe(seen.append, kinds=(Notice, GroupDropped))
    engine = rl.RolloutEngine(
        scripted_policy(), env=_rows(("over", "short", "broken")), renderer=HermesRenderer(), budget=_BUDGET
    )
    groups = run_virtual(partial(_rolled_out, engine, events, 3))
    tokens = {group.index: [traj.generated_tokens for traj in group.members_G] for group in groups}
    assert tokens == {0: [0, 0], 1: [4, 4]}
    named = [event.keys["group"] for event in seen if isinstance(event, Notice) and event.name == "row_not_sampled"]
    assert named == [0]
    assert [event.group for event in seen if isinstance(event, GroupDropped)] == [2]


def test_an_evaluation_counts_it_as_truncated_and_names_the_row() -> None:
    """The notice leaves the evaluation's own events; the measurement goes on."""
    case = Case(
        _rows(("short", "over", "short")),
        engine={"budget": _BUDGET},
        evaluator=rl.Evaluator(rows=[0, 1], group_size=2),
    )
    case.play(1, 1)
    first = case.of(EvaluationFinished)[0]
    assert first.metrics["truncated_frac"] == 0.5
    assert [keys["row"] for keys in case.notices("row_not_sampled")] == ["1", "1"]  # before and after the step


class _LongChat(Chat):
    """Some rows have no room for a single token."""

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "x" * (300 if row in (1, 4, 5) else 5)}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return 0.0 if traj.truncated else await super().reward(traj, row)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped leaves what a kill would leave, and all of its journal; disks need not be waited for."""

    async def nothing(self: RunSaver, state: Any, capture: Any) -> None:
        return

    monkeypatch.setattr(RunSaver, "save_at_end", nothing)
    monkeypatch.setattr(Journal, "forget", lambda self, n: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.slow
@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize("order", ["completion", "admission"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_run_is_resumed_with_groups_that_never_sampled(tmp_path: Path, max_staleness: int, order: str) -> None:
    """Killed at any third of a second, also while such a group is ready and waits: each row is consumed once."""
    plan = Plan(
        steps=4,
        max_staleness=max_staleness,
        rollout_every=0.2,
        weights_every=100,
        engine={"budget": rl.Budget(max_context_tokens=200)},
        trainer={"batch_order": order},
    )
    for third in range(1, 16):
        directory = tmp_path / str(third)
        lives = [Life(plan, directory) for _ in range(2)]
        for life, seconds in zip(lives, (third / 3, None), strict=True):
            life.engine.factory = env_factory(partial(_LongChat, life))
            life.play(seconds)
        journal = entries(directory)
        assert [entry.n for entry in journal] == [1, 2, 3, 4]
        assert set(consumed_rows(journal).values()) == {1}
        assert sum(consumed_rows(journal).values()) == 8
        assert lives[-1].learner.version == sum(len(entry.updates) for entry in journal)
