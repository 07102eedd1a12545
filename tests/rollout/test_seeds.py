"""No two choices of a run, and of another run, are drawn with the same seed."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.rollout.groupplan import GroupPlan, derived
from asyncrl.testing import END, ScriptedSampler
from asyncrl.types import Message, Trajectory
from tests.faults.case import Case, One
from tests.resume.runs import Life, Plan


def _member_seeds(seed: int, prefix: str = "") -> list[int]:
    """Of four attempts of eight members of eight groups."""
    plans = [GroupPlan(index=index, row=0, size=8, seed=seed, prefix=prefix) for index in range(8)]
    return [
        plan.member(member, attempt).seed for plan, member, attempt in itertools.product(plans, range(8), range(1, 5))
    ]


def test_runs_groups_members_and_attempts_share_no_seed() -> None:
    """Nor do two runs have the same differences between their seeds, which a sum would give them."""
    runs = {seed: _member_seeds(seed) for seed in (*range(16), -1, 2**40, 1_000_003, 15_485_863)}
    runs |= {1000 + seed: _member_seeds(seed, "eval3-") for seed in range(4)}
    drawn = list(itertools.chain(*runs.values()))
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 2**31 for seed in drawn)
    shifts = Counter(
        two - one for first, second in itertools.pairwise(runs.values()) for one, two in zip(first, second, strict=True)
    )
    assert shifts.most_common(1)[0][1] == 1


def test_the_seeds_are_spread_evenly() -> None:
    """The bits of a hash, for numbers that follow each other."""
    bits = Counter(bit for group in range(512) for bit in range(31) if derived(0, group) >> bit & 1)
    assert all(180 < bits[bit] < 332 for bit in range(31))


class _Turns(One):
    """Three turns; the second member fails once."""

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        if traj.member == 1 and traj.attempt == 1:
            raise rl.InfrastructureError("once")
        return [{"role": "user", "content": "on"}] if traj.turns < 3 else None


def _request_seeds(seed: int) -> list[int]:
    sampler = ScriptedSampler(tokens=lambda request: [65, 66, 67, 68, END][len(request.input_ids) % 5 :])
    budget = rl.Budget(segment_tokens=2)
    case = Case(
        _Turns, sampler=sampler, engine={"seed": seed, "budget": budget, "failures": rl.Failures(retry_delay=0)}
    )
    case.play(2)
    return [request.seed or 0 for request in sampler.requests]


def test_the_requests_of_two_runs_share_no_seed() -> None:
    """Over segments, turns, members, attempts and groups."""
    runs = [_request_seeds(seed) for seed in range(4)]
    drawn = list(itertools.chain(*runs))
    assert len(drawn) > 150
    assert len(set(drawn)) == len(drawn)
    assert _request_seeds(2) == runs[2]


def test_an_evaluation_draws_the_same_each_time_and_apart_from_training() -> None:
    """Two of them differ by the policy that they measure only."""
    assert _member_seeds(0, "eval1-") == _member_seeds(0, "eval7-")
    sampler = ScriptedSampler()
    case = Case(sampler=sampler, evaluator=rl.Evaluator(rows=[0, 1], every=1))
    case.play(2)
    seeds: dict[str, set[int | None]] = {}
    for request in sampler.requests:
        seeds.setdefault(request.trajectory_id.partition("-")[0], set()).add(request.seed)
    measured = [found for name, found in seeds.items() if name.startswith("eval")]
    trained = set().union(*(found for name, found in seeds.items() if not name.startswith("eval")))
    assert len(measured) == 3
    assert measured[0] == measured[1] == measured[2]
    assert not measured[0] & trained


@pytest.mark.slow
@pytest.mark.usefixtures("threads_in_place")
@pytest.mark.parametrize("seconds", [0.5, 1.1, 1.9])
def test_a_resumed_run_goes_on_with_the_same_seeds(tmp_path: Path, seconds: float) -> None:
    """Of every segment of every trajectory, wherever it was stopped."""
    plan = Plan(engine={"budget": rl.Budget(segment_tokens=2)})
    whole = Life(plan, tmp_path / "whole")
    whole.play()
    asked = {(request.trajectory_id, len(request.input_ids)): request.seed for request in whole.sampler.requests}
    parts = Life(plan, tmp_path / "parts")
    parts.play(seconds)
    again = Life(plan, tmp_path / "parts")
    again.play()
    found = {
        (request.trajectory_id, len(request.input_ids)): request.seed
        for request in (*parts.sampler.requests, *again.sampler.requests)
    }
    assert found == asked


@pytest.mark.parametrize("seed", [None, "0", 1.0, True, 2**64])
def test_a_seed_that_is_no_integer_is_refused(seed: object) -> None:
    """By name, before anything starts."""
    with pytest.raises(ConfigError, match="seed is "):
        Case(engine={"seed": seed})
