"""Every combination of the schedule's options that cannot run is refused at construction, and its remedies work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.testing import ByteRenderer, scripted_policy
from asyncrl.types import Message, Row, Trajectory

_ENGINE = ("sampling_policy", "temperature")
_CHUNKS = rl.ForwardBackwardBatch(min_sequences=4)
_KEEP = {"stale_policy": "keep", "allow_unbounded_staleness": True, "allow_trajectory_loss": True}
_MASK = {"stale_policy": "mask_span", "allow_trajectory_loss": True}
_CARRY = {"mode": "deadline", "max_straggler_tokens": 8, "on_stragglers": "carry_over"}
_DISCARD = {**_CARRY, "on_stragglers": "discard"}
_TRUNCATE = {**_CARRY, "on_stragglers": "truncate"}
_CARRIED = {"max_staleness": 1, "completion": _CARRY, "advantage": rl.Batchwise(), **_KEEP}


class _Env(rl.Env):
    async def reset(self, row: Row) -> list[Message]:
        return []

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return 0.0


def _build(options: Mapping[str, Any]) -> None:
    """A trainer; dictionaries become the option objects that they are the arguments of."""
    options = dict(options)
    kv_cache = options.pop("kv_cache", None)
    completion = rl.GroupCompletion(**options.pop("completion", {}))
    engine = rl.RolloutEngine(
        scripted_policy(),
        env=_Env,
        renderer=ByteRenderer(),
        schedule=rl.Schedule(**options.pop("schedule", {})),
        kv_cache=None if kv_cache is None else rl.KVCache(**kv_cache),
        **{key: options.pop(key) for key in _ENGINE if key in options},
    )
    rl.AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=1e-3),
        completion=completion,
        **{"groups_per_step": 2, "group_size": 4, "max_staleness": 0, **options},
    )


_REFUSED: list[tuple[dict[str, Any], list[str], list[dict[str, Any]]]] = [
    # Options, what the error names, and changes of which each is enough.
    (
        {"forward_backward_batch": _CHUNKS, "max_staleness": 2},
        ["forward_backward_batch", "max_staleness is 2"],
        [{"max_staleness": 0}, {"forward_backward_batch": "auto"}, {"forward_backward_batch": None}],
    ),
    (
        {"forward_backward_batch": _CHUNKS, **_KEEP},
        ["forward_backward_batch", "stale_policy is 'keep'"],
        [{"stale_policy": "wait"}, {"forward_backward_batch": "auto"}],
    ),
    (
        {"forward_backward_batch": _CHUNKS, **_MASK},
        ["forward_backward_batch", "stale_policy is 'mask_span'"],
        [{"stale_policy": "wait"}, {"forward_backward_batch": "auto"}],
    ),
    (
        {"forward_backward_batch": _CHUNKS, "completion": _TRUNCATE, "allow_trajectory_loss": True},
        ["forward_backward_batch", "completion.mode is 'deadline'"],
        [{"completion": {}}, {"forward_backward_batch": "auto"}],
    ),
    (
        {"forward_backward_batch": _CHUNKS, "sampling_policy": "segment", "kv_cache": {"max_staleness": 1}},
        ["forward_backward_batch", "sampling_policy is 'segment'"],
        [{"sampling_policy": "trajectory", "kv_cache": None}, {"forward_backward_batch": "auto"}],
    ),
    (
        {"forward_backward_batch": _CHUNKS, "advantage": rl.Batchwise()},
        ["forward_backward_batch", "advantage", "GroupCentered"],
        [{"advantage": rl.GroupCentered()}, {"forward_backward_batch": "auto"}],
    ),
    (
        {**_CARRIED, "advantage": rl.GroupCentered()},
        ["completion.on_stragglers is 'carry_over'", "advantage", "Batchwise"],
        [{"advantage": rl.Batchwise()}, {"completion": _DISCARD}],
    ),
    (
        {**_CARRIED, "normalize": "prompt"},
        ["completion.on_stragglers is 'carry_over'", "normalize='prompt'"],
        [{"normalize": "token"}, {"normalize": "sequence"}, {"normalize": "batch"}, {"completion": _DISCARD}],
    ),
    (
        {**_CARRIED, "max_staleness": 0},
        ["completion.on_stragglers is 'carry_over'", "max_staleness is 0"],
        [{"max_staleness": 1}, {"completion": _DISCARD}],
    ),
    (
        {**_CARRIED, "stale_policy": "wait"},
        ["completion.on_stragglers is 'carry_over'", "stale_policy is 'wait'"],
        [{"stale_policy": "mask_span"}, {"stale_policy": "keep"}, {"completion": _TRUNCATE}],
    ),
    (
        {"max_staleness": 1, "completion": _DISCARD, "allow_trajectory_loss": True},
        ["completion.on_stragglers is 'discard'", "stale_policy is 'wait'"],
        [{"stale_policy": "mask_span"}, {"completion": _TRUNCATE}],
    ),
    (
        {"completion": _TRUNCATE},
        ["completion.on_stragglers='truncate'", "allow_trajectory_loss=True"],
        [{"allow_trajectory_loss": True}, {"completion": {}}],
    ),
    (
        {"completion": _DISCARD, **_MASK, "allow_trajectory_loss": False},
        ["completion.on_stragglers='discard'", "stale_policy='mask_span'", "allow_trajectory_loss=True"],
        [{"allow_trajectory_loss": True}],
    ),
    (
        {"completion": {"mode": "deadline"}, "allow_trajectory_loss": True},
        ["completion.max_straggler_tokens is None"],
        [{"completion": _TRUNCATE}, {"completion": {}}],
    ),
    (
        {"completion": {"mode": "wait", "max_straggler_tokens": 8}},
        ["completion.max_straggler_tokens is 8", "completion.mode='deadline'"],
        [{"completion": _TRUNCATE, "allow_trajectory_loss": True}, {"completion": {"mode": "wait"}}],
    ),
    (
        {"group_size": 4, "completion": {"min_members": 5}},
        ["group_size is 4", "completion.min_members"],
        [{"group_size": 5}, {"completion": {"min_members": 4}}],
    ),
    (
        {"schedule": {"oversample_factor": 1.5}},
        ["schedule.oversample_factor is 1.5", "max_staleness is 0"],
        [{"schedule": {}}, {"max_staleness": 1}],
    ),
    (
        {"repeat_dataset": False, **_KEEP},
        ["stale_policy is 'keep'", "repeat_dataset=False"],
        [{"repeat_dataset": True}, {"stale_policy": "wait"}],
    ),
    (
        {"batch_order": "admission", **_MASK},
        ["stale_policy is 'mask_span'", "batch_order='admission'"],
        [{"batch_order": "completion"}, {"stale_policy": "wait"}],
    ),
    (
        {"kv_cache": {"max_staleness": 1}},
        ["kv_cache", "sampling_policy='trajectory'"],
        [{"kv_cache": None}, {"sampling_policy": "segment"}],
    ),
    (
        {"sampling_policy": "segment"},
        ["sampling_policy is 'segment'", "max_staleness=0", "on_limit='hold'", "allow_reprefill=True"],
        [
            {"kv_cache": {"max_staleness": 1}},
            {"kv_cache": {"on_limit": "refill", "allow_reprefill": True}},
            {"sampling_policy": "trajectory"},
        ],
    ),
    (
        {"sampling_policy": "segment", "kv_cache": {"max_staleness": 1, "on_limit": "refill"}},
        ["kv_cache.on_limit='refill'", "allow_reprefill=True"],
        [{"kv_cache": {"max_staleness": 1, "on_limit": "refill", "allow_reprefill": True}}],
    ),
    (
        {"temperature": 0.0},
        ["temperature is 0"],
        [{"temperature": 0.7}],
    ),
]


@pytest.mark.parametrize(("options", "names", "remedies"), _REFUSED, ids=[names[0] for _, names, _ in _REFUSED])
def test_what_cannot_run_is_refused_and_each_remedy_runs(
    options: dict[str, Any], names: list[str], remedies: list[dict[str, Any]]
) -> None:
    """The error names every key that is part of the problem; each change of one of them alone is accepted."""
    with pytest.raises(ConfigError) as caught:
        _build(options)
    for name in names:
        assert name in str(caught.value)
    for remedy in remedies:
        _build({**options, **remedy})
