"""Whole runs whose groups close by a token deadline: who is trained, who is cut, and how much stragglers may sample."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

import asyncrl as rl
from asyncrl.events import DeadlinePassed, Event, MemberDiscarded, MemberFinished, SegmentSampled
from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.rules import Stragglers
from asyncrl.testing import run_virtual
from asyncrl.types import DropReason, Trajectory, TruncationCause
from tests.scheduling.audit import watched
from tests.scheduling.promises import assert_ages, assert_nothing_is_held
from tests.scheduling.runs import NEWEST, Run, Shape, drawn

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")

_KEEP = {"stale_policy": "keep", "allow_unbounded_staleness": True, "allow_trajectory_loss": True}
_MASK = {"stale_policy": "mask_span", "allow_trajectory_loss": True}
_WAIT = {"stale_policy": "wait", "allow_trajectory_loss": True}


def _shape(seed: int, rule: Stragglers, **trainer: Any) -> Shape:
    """Groups of four of which some members need many turns, and deadlines from none to a few segments."""
    draw = random.Random(seed)
    completion = rl.GroupCompletion(
        mode="deadline",
        min_members=draw.choice([2, 2, 3]),
        max_straggler_tokens=draw.choice([0, 2, 4, 9, 20]),
        on_stragglers=rule,
    )
    base = drawn(seed, max_staleness=draw.choice([1, 2]), kv_cache=draw.choice([None, NEWEST]))
    return replace(
        base,
        group_size=4,
        turns=lambda traj: random.Random(f"{seed}/{traj.id}").choice([1, 1, 1, 2, 4, 8]),
        flat_rows=frozenset(),
        trainer={"completion": completion, "truncation": rl.Truncation(train="reward"), **trainer},
    )


@dataclass
class _Straggler:
    """What one member did after its group had its quorum."""

    in_flight: int
    """Requests under way at the quorum: 0 or 1."""
    in_flight_tokens: int = 0
    tokens: int = 0
    """Of requests that began after it."""


class _Allowance:
    """Watches that no member samples more than it may once its group has enough members."""

    def __init__(self, run: Run, completion: rl.GroupCompletion) -> None:
        self._run = run
        self._completion = completion
        self._answered: Counter[tuple[int, int]] = Counter()
        self._finished: Counter[int] = Counter()
        self._stragglers: dict[tuple[int, int], _Straggler] = {}
        self.passed: set[int] = set()
        self.excess: list[tuple[int, int, _Straggler]] = []
        # Group, member, what it sampled: kept for the end, because an observer must not raise.

    def observe(self, event: Event) -> None:
        """An event as it happens, so that what was dispatched before it is known."""
        match event:
            case MemberFinished(group=group):
                self._finished[group] += 1
                if self._finished[group] == self._completion.min_members:
                    self._quorum(group)
            case DeadlinePassed(group=group):
                self.passed.add(group)
            case SegmentSampled(group=group, member=member, tokens=tokens):
                self._answered[group, member] += 1
                self._sampled(group, member, tokens)

    def _quorum(self, group: int) -> None:
        asked = Counter(dispatch.member for dispatch in self._run.sampler.dispatches if dispatch.group == group)
        for member in range(self._run.shape.group_size):
            in_flight = asked[member] - self._answered[group, member]
            self._stragglers[group, member] = _Straggler(in_flight=in_flight)

    def _sampled(self, group: int, member: int, tokens: int) -> None:
        straggler = self._stragglers.get((group, member))
        if straggler is None or (group in self.passed and self._completion.on_stragglers == "carry_over"):
            return
        if straggler.in_flight:
            straggler.in_flight = 0
            straggler.in_flight_tokens = tokens
        else:
            straggler.tokens += tokens
            total = straggler.in_flight_tokens + straggler.tokens
            if group in self.passed or total > (self._completion.max_straggler_tokens or 0):
                self.excess.append((group, member, straggler))


def _play(shape: Shape, seed: int) -> tuple[Run, set[int]]:
    """The run, and the groups whose deadline passed."""
    run = Run(shape)
    allowance = _Allowance(run, shape.trainer["completion"])
    held: list[int] = []
    with watched(Admission) as admissions:
        run.bus.subscribe(allowance.observe)
        run.bus.subscribe(lambda event: held.extend(admission.slots_in_use for admission in admissions))
        run_virtual(run.to_the_end, seed=seed)
    assert max(held) <= shape.slots
    [admission] = admissions
    assert (admission.admitted, admission.outstanding, admission.slots_in_use) == (shape.groups, 0, 0)
    assert len(run.steps) == shape.steps
    assert_nothing_is_held(run)
    assert allowance.excess == []
    return run, allowance.passed


def _assert_members(run: Run, discarded: set[tuple[int, int]]) -> list[Trajectory]:
    """Each member of each group is in one batch, or was discarded; what is in a batch with tokens is trained once."""
    members = [traj for step in run.steps for traj in step.trajectories]
    consumed = Counter((traj.group, traj.member) for traj in members)
    everyone = {(group, member) for group in range(run.shape.groups) for member in range(run.shape.group_size)}
    assert set(consumed.values()) == {1}
    assert consumed.keys() | discarded == everyone
    assert consumed.keys().isdisjoint(discarded)
    trained = Counter((trained.group, trained.member) for trained in run.learner.trained)
    able = {(traj.group, traj.member) for traj in members if traj.dropped is None and traj.generated_tokens}
    assert set(trained.values()) <= {1}
    assert trained.keys() <= able
    if run.shape.trainer["stale_policy"] != "mask_span":
        assert trained.keys() == able
    return members


@pytest.mark.parametrize("stale", [_WAIT, _KEEP], ids=["wait", "keep"])
@pytest.mark.parametrize("seed", range(50))
def test_truncated_stragglers_are_trained_where_they_were_cut(seed: int, stale: dict[str, Any]) -> None:
    """Groups stay whole; exactly the members that were cut have that cause, and only in groups that passed."""
    run, passed = _play(_shape(seed, "truncate", **stale), seed)
    members = _assert_members(run, set())
    cut = [traj for traj in members if traj.truncated is TruncationCause.GROUP_DEADLINE]
    assert {traj.group for traj in cut} == passed
    discarded = {(event.group, event.member) for event in run.of(MemberDiscarded)}
    assert discarded == {(traj.group, traj.member) for traj in cut if not traj.spans}
    for traj in members:
        assert traj.truncated in (None, TruncationCause.GROUP_DEADLINE)
        assert traj.dropped is (DropReason.STRAGGLER if (traj.group, traj.member) in discarded else None)
        assert (traj.reward is None) == (traj.dropped is not None)
    if stale is _WAIT:
        assert_ages(run)
        everyone = Counter(traj.group for step in run.steps for traj in step.trajectories)
        assert set(everyone.values()) == {run.shape.group_size}
        assert all(len({t.group for t in step.trajectories}) == run.shape.groups_per_step for step in run.steps)


@pytest.mark.parametrize("stale", [_MASK, _KEEP], ids=["mask_span", "keep"])
@pytest.mark.parametrize("seed", range(50))
def test_discarded_stragglers_are_reported_and_nobody_else_is_missing(seed: int, stale: dict[str, Any]) -> None:
    """A batch has groups of which only those members are missing that were discarded, each once."""
    run, passed = _play(_shape(seed, "discard", **stale), seed)
    reported = [(event.group, event.member) for event in run.of(MemberDiscarded)]
    members = _assert_members(run, set(reported))
    assert len(reported) == len(set(reported))
    assert {group for group, _ in reported} == passed
    assert all(traj.truncated is None and traj.dropped is None for traj in members)
    assert all(len({t.group for t in step.trajectories}) == run.shape.groups_per_step for step in run.steps)
    if stale is _MASK:
        assert_ages(run)


@pytest.mark.parametrize("stale", [_MASK, _KEEP], ids=["mask_span", "keep"])
@pytest.mark.parametrize("seed", range(50))
def test_carried_stragglers_are_trained_later(seed: int, stale: dict[str, Any]) -> None:
    """Every member is in exactly one batch, and every batch has its full number of members, of whatever groups."""
    run, _ = _play(_shape(seed, "carry_over", advantage=rl.Batchwise(), **stale), seed)
    members = _assert_members(run, set())
    assert all(traj.truncated is None and traj.dropped is None for traj in members)
    size = run.shape.groups_per_step * run.shape.group_size
    assert [len(step.trajectories) for step in run.steps] == [size] * run.shape.steps
    assert len(run.of(MemberFinished)) == len(members)
    if stale is _MASK:
        assert_ages(run)


@pytest.mark.parametrize("rule", ["truncate", "discard", "carry_over"])
def test_the_random_runs_go_to_the_limits(rule: Stragglers) -> None:
    """Some deadlines pass and some do not, some members are cut in mid-conversation, some groups are divided."""
    options = {**_KEEP, "advantage": rl.Batchwise()}
    passed, groups, divided, begun = 0, 0, 0, 0
    for seed in range(20):
        run, closed = _play(_shape(seed, rule, **options), seed)
        passed += len(closed)
        groups += run.shape.groups
        steps = Counter(group for step in run.steps for group in {traj.group for traj in step.trajectories})
        divided += sum(count > 1 for count in steps.values())
        begun += sum(event.generated_tokens > 0 for event in run.of(MemberDiscarded))
        begun += sum(
            traj.truncated is not None and traj.generated_tokens > 0 for step in run.steps for traj in step.trajectories
        )
    assert 0 < passed < groups
    assert (divided > 0) == (rule == "carry_over")
    assert (begun > 0) == (rule != "carry_over")
