from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.simulation.options import Distribution, Durations
from asyncrl.simulation.workload import GroupScript, make_workload
from tests.simulation.recording import run_options


def _lengths(group: GroupScript) -> list[int]:
    return [turn.tokens for member in group.members for turn in member.turns]


def test_a_distribution_has_the_mean_that_it_is_named_for() -> None:
    """Whatever its tail; without sigma it is a constant."""
    source = random.Random(0)
    drawn = [Distribution(mean=100.0, sigma=1.0).draw(source) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(100, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(60.7, rel=0.05)
    assert Distribution(mean=7.0).draw(source) == 7.0


def test_lengths_belong_together_within_a_group(tmp_path: Path) -> None:
    """Half of the variance of their logarithm is the row's, so group means vary more than they would by chance."""
    durations = Durations(turns=1, turn_tokens=Distribution(mean=1000.0, sigma=1.0))
    groups = make_workload(run_options(tmp_path, "trainer.group_size=8"), durations, groups=400, seed=0).groups
    means = [statistics.fmean(_lengths(group)) for group in groups]
    alone = statistics.pstdev([length for group in groups for length in _lengths(group)]) / 8**0.5
    assert statistics.pstdev(means) > 1.5 * alone


def test_what_the_user_says_is_what_is_played(tmp_path: Path) -> None:
    """Two turns with a tool in between, and the seconds as given."""
    durations = Durations(
        turns=2,
        turn_tokens=Distribution(mean=50.0),
        seconds_per_token=(0.02, 0.001),
        tool_seconds=Distribution(mean=3.0),
        train_seconds=8.0,
        publish_seconds=0.5,
    )
    made = make_workload(run_options(tmp_path), durations, groups=3, seed=0)
    assert len(made.groups) == 3
    [member, _] = made.groups[0].members
    assert [(turn.tokens, turn.reply_s) for turn in member.turns] == [(50, 3.0), (50, 0.0)]
    own, shared = made.sampling.parts(1, 50, 10)
    assert own + shared == pytest.approx(50 * 0.02)
    assert shared == pytest.approx(50 * 0.001)
    assert made.training.seconds(1, 4, 200) == pytest.approx(8.0)
    assert made.publication.parts(1) == (0.5, 0.0)


def test_defaults_follow_from_the_recipe(tmp_path: Path) -> None:
    """A quarter of each turn's share of the budget; training takes as long as sampling the batch."""
    overrides = ["budget.max_turns=4", "budget.max_generated_tokens=1600", "schedule.concurrency=10"]
    made = make_workload(run_options(tmp_path, *overrides), Durations(), groups=2000, seed=0)
    lengths = [length for group in made.groups for length in _lengths(group)]
    assert {len(member.turns) for group in made.groups for member in group.members} == {4}
    assert statistics.fmean(lengths) == pytest.approx(100, rel=0.05)
    # 4 sequences of 400 tokens, each token 0.02 / 10 + 0.0002 seconds of the servers.
    assert made.training.seconds(1, 4, 0) == pytest.approx(1600 * 0.0022)
    assert made.publication.parts(1)[0] == pytest.approx(160 * 0.0022)


def test_a_seed_makes_the_same_workload(tmp_path: Path) -> None:
    """And another one another."""
    first, again, other = (make_workload(run_options(tmp_path), Durations(), groups=3, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.groups != other.groups


def test_impossible_durations_are_refused() -> None:
    """With their key."""
    with pytest.raises(ConfigError, match=r"--turn-tokens is 0\.5"):
        Durations(turn_tokens=Distribution(mean=0.5))
    with pytest.raises(ConfigError, match=r"--seconds-per-token is '0\.1:0\.2'"):
        Durations(seconds_per_token=(0.1, 0.2))
