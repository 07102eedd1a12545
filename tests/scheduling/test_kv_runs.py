"""Whole runs whose trajectories follow newer weights as far as the age of their prefix lets them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import asyncrl as rl
from tests.scheduling.promises import assert_promises
from tests.scheduling.runs import Run, drawn

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")

_RULES = [
    rl.KVCache(max_staleness=1),
    rl.KVCache(max_staleness=2),
    *[rl.KVCache(max_staleness=bound, on_limit="refill", allow_reprefill=True) for bound in (0, 1, 2)],
]


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", _RULES, ids=lambda rule: f"{rule.on_limit}-{rule.max_staleness}")
@pytest.mark.parametrize("max_staleness", [1, 4])
def test_a_reused_prefix_is_never_older_than_its_bound(max_staleness: int, kv_cache: rl.KVCache) -> None:
    """By the sampler's own memory of who filled each cache namespace; and every promise of ``wait`` holds too.

    ``refill`` always samples with what is live. Over the seeds the bound is reached, and trajectories change version.
    """
    ages, changes = set(), 0
    for seed in range(25):
        shape = drawn(seed, max_staleness=max_staleness, kv_cache=kv_cache)
        run = Run(replace(shape, turns=lambda traj: 3, parts=1, flat_rows=frozenset()))
        assert_promises(run, run.play(seed))
        ages |= {dispatch.kv_age for dispatch in run.sampler.dispatches}
        changes += sum(len(trained.sampled) > 1 for trained in run.learner.trained)
    assert ages == set(range(min(kv_cache.max_staleness, max_staleness) + 1))
    assert changes > 0
