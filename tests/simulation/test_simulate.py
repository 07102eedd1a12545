from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.events import Event
from asyncrl.observe.metrics import percentile
from asyncrl.simulation.cost import Cost
from asyncrl.simulation.grid import Point, own_point
from asyncrl.simulation.options import Durations
from asyncrl.simulation.recorded import read_run
from asyncrl.simulation.simulate import Outcome, Simulation
from asyncrl.simulation.workload import Workload, make_workload, steps_per_hour
from tests.simulation.recording import run_options, workload, write_events


def _simulate(folder: Path, script: Workload, *overrides: str, steps: int = 6) -> Outcome:
    own = run_options(folder, *overrides)
    return Simulation(own, own_point(own), script, steps=steps, seed=0).run()


def test_a_synchronous_step_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    """By hand: 1 s of sampling, a reply of 0.5 s, 3 s of training, 0.25 s staging and 1 s publication."""
    script = workload(tokens=10, own=0.1, reply_s=0.5, train_s=3.0, publish_s=1.0)
    outcome = _simulate(tmp_path, script, "trainer.max_staleness=0")
    assert outcome.steps == 6
    assert outcome.steps_per_hour == pytest.approx(3600 / 5.75)
    assert outcome.shares["forward_backward"] == pytest.approx(3 / 5.75)
    assert outcome.shares["wait_for_samples"] == pytest.approx(1.5 / 5.75)
    assert outcome.shares["publication"] == pytest.approx(1.25 / 5.75)
    assert (outcome.age_mean, outcome.age_p99) == (0.0, 0)
    assert outcome.tokens_per_second == pytest.approx(40 / 5.75)


def test_an_asynchronous_trainer_that_is_the_bottleneck_never_waits(tmp_path: Path) -> None:
    """All but staging is hidden behind 3 s of training; its samples are one version old."""
    script = workload(tokens=10, own=0.1, reply_s=0.5, train_s=3.0, publish_s=1.0)
    outcome = _simulate(tmp_path, script)
    assert outcome.steps_per_hour == pytest.approx(3600 / 3.25)
    assert outcome.training_share == pytest.approx(3 / 3.25)
    assert outcome.shares["wait_for_samples"] == pytest.approx(0.0)
    assert (outcome.age_mean, outcome.age_p99) == (1.0, 1)


def test_servers_that_are_the_bottleneck_set_the_pace(tmp_path: Path) -> None:
    """Four trajectories a step of 10 tokens, 0.1 s each of a server that they share: 4 s a step."""
    outcome = _simulate(tmp_path, workload(tokens=10, own=0.0, shared=0.1, train_s=0.5), steps=10)
    assert outcome.steps_per_hour == pytest.approx(3600 / 4, rel=0.05)


def test_the_recipes_budget_divides_turns_into_requests(tmp_path: Path) -> None:
    """Requests of at most 4 tokens with 1 s latency each: 3 of them, and 10 tokens."""
    script = replace(workload(train_s=1.0), sampling=replace(workload().sampling, own=(1.0, 0.1, 0.0)))
    outcome = _simulate(tmp_path, script, "trainer.max_staleness=0", "budget.segment_tokens=4")
    assert outcome.steps_per_hour == pytest.approx(3600 / (3 + 1 + 1))


def test_concurrency_holds_trajectories_back(tmp_path: Path) -> None:
    """Four trajectories of 2 s each, two at a time."""
    script = workload(tokens=20, own=0.1, train_s=1.0)
    outcome = _simulate(tmp_path, script, "trainer.max_staleness=0", "schedule.concurrency=2")
    assert outcome.steps_per_hour == pytest.approx(3600 / (2 + 2 + 1))


def test_environments_take_their_time_to_begin(tmp_path: Path) -> None:
    """2 s before the first request of each trajectory."""
    script = replace(workload(train_s=1.0), reset_s=2.0)
    outcome = _simulate(tmp_path, script, "trainer.max_staleness=0")
    assert outcome.steps_per_hour == pytest.approx(3600 / (2 + 1 + 1))


def test_synchronous_training_overlaps_as_the_recipe_says(tmp_path: Path) -> None:
    """A group that is done after 1 s, another after 6 s; each takes 2 s to train, the first one meanwhile if it may."""
    quick, slow = workload(tokens=10).groups[0], workload(tokens=60).groups[0]
    # 32 steps of two groups: each has one of both.
    script = replace(workload(), groups=[quick, slow] * 32, training=Cost(coefficients=(0.0, 1.0, 0.0)))
    early = "trainer.forward_backward_batch={ min_sequences = 2 }"
    apart = _simulate(tmp_path, script, "trainer.max_staleness=0", "trainer.forward_backward_batch=off", steps=32)
    together = _simulate(tmp_path, script, "trainer.max_staleness=0", early, steps=32)
    assert apart.steps_per_hour == pytest.approx(3600 / 10)
    assert together.steps_per_hour == pytest.approx(3600 / 8)


def test_ages_are_weighted_by_tokens(tmp_path: Path) -> None:
    """Turns sampled under newer and newer versions: most tokens are of age 1, some of age 2 and none older."""
    rules = ("rollout.sampling_policy=segment", "rollout.kv_cache={ on_limit = 'refill', allow_reprefill = true }")
    script = workload(turns=4, own=0.1, reply_s=1.0, train_s=1.5)
    outcome = _simulate(tmp_path, script, "trainer.max_staleness=2", *rules, steps=20)
    assert 1.0 < outcome.age_mean < 1.5
    assert outcome.age_p99 == 2


def test_percentiles_are_ages_that_occur() -> None:
    """The smallest that at least so many tokens do not exceed."""
    assert percentile(Counter({0: 90, 1: 9, 2: 1}), 99) == 1
    assert percentile(Counter({0: 98, 2: 2}), 99) == 2
    assert percentile(Counter(), 99) == 0


def test_truncated_members_are_cut_like_in_the_run(tmp_path: Path) -> None:
    """Their script goes on, the budget does not, and training goes by the recipe's truncation rule."""
    script = workload(tokens=10, own=0.1, train_s=3.0)
    group = script.groups[0]
    cut = replace(script, groups=[replace(group, members=tuple(replace(m, truncated=True) for m in group.members))])
    same = ["trainer.max_staleness=0", "budget.max_generated_tokens=10"]
    assert _simulate(tmp_path, cut, *same, "truncation.train=reward").steps_per_hour == pytest.approx(900)
    # With rewards of zero there is no gradient, and no training.
    assert _simulate(tmp_path, cut, *same).steps_per_hour == pytest.approx(3600)
    # That would end a run; here it is not the question.
    ended = "failures.untrained_batches=2"
    assert _simulate(tmp_path, cut, *same, ended).steps_per_hour == pytest.approx(3600)
    # A larger budget finds nothing more to sample.
    assert _simulate(tmp_path, cut, "trainer.max_staleness=0").steps_per_hour == pytest.approx(3600)


def test_the_same_seed_gives_the_same_outcome(tmp_path: Path) -> None:
    """To the last bit, with lengths, tools and ratios drawn at random."""
    own = run_options(tmp_path)
    script = make_workload(own, Durations(turns=2), groups=16, seed=5)
    script = replace(script, sampling=replace(script.sampling, ratios=(0.5, 1.0, 1.5)))
    outcomes = [Simulation(own, own_point(own), script, steps=4, seed=seed).run() for seed in (5, 5, 6)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].steps_per_hour != outcomes[2].steps_per_hour


def test_a_simulated_run_read_back_predicts_itself(tmp_path: Path) -> None:
    """The events of a simulation are a run: replaying them ends at the same rate and the same ages."""
    own = run_options(tmp_path)
    script = make_workload(own, Durations(turns=2), groups=16, seed=1)
    events: list[Event] = []
    simulation = Simulation(own, own_point(own), script, steps=20, seed=1)
    simulation.events.subscribe(events.append)
    first = simulation.run()
    recording = read_run(write_events(tmp_path, events))
    assert steps_per_hour(recording.steps, recording.max_staleness) == pytest.approx(first.steps_per_hour)
    again = Simulation(own, own_point(own), recording.workload, steps=20, seed=2).run()
    assert again.steps_per_hour == pytest.approx(first.steps_per_hour, rel=0.05)
    assert again.age_mean == pytest.approx(first.age_mean, abs=0.1)


def test_what_the_trainer_refuses_is_refused_before_the_run(tmp_path: Path) -> None:
    """Oversampling without a bound to sample ahead."""
    point = Point(max_staleness=0, admit_ahead=0, concurrency=4, oversample_factor=2.0)
    with pytest.raises(ConfigError, match="oversample_factor is 2"):
        Simulation(run_options(tmp_path), point, workload(), steps=1, seed=0)


def test_a_workload_without_time_has_no_rate(tmp_path: Path) -> None:
    """All steps end at once."""
    with pytest.raises(ConfigError, match="nothing in this workload takes time"):
        _simulate(tmp_path, workload(own=0.0))


def test_full_weights_cannot_be_pinned_here_either(tmp_path: Path) -> None:
    """The simulated policy can do what the recipe's can."""
    own = run_options(tmp_path, lora_rank=None)
    with pytest.raises(ConfigError, match="full weights"):
        Simulation(own, own_point(own), workload(), steps=1, seed=0)
