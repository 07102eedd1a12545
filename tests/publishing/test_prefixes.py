"""Updates of full weights under running requests: no token is sampled on context that is older than the rule allows.

Whole runs of the real engine, trainer, client and publisher on scripted servers with a prefix cache.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.publishing.full import Prefixes
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.wire import PauseMode
from asyncrl.testing import END, ByteRenderer, run_virtual
from asyncrl.testing.server import ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, theta_logprobs
from asyncrl.types import Message, Row, Segment, StopReason, Trajectory

URLS = ("http://one:30000", "http://two:30000")


class _Env(rl.Env):
    """Three turns on a long prompt; members differ in reward."""

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": f"row {row} " * 4}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        return None if traj.turns == 3 else [{"role": "user", "content": "go on"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.member)


class _Sampler(SGLang):
    """Remembers what was asked and answered."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[tuple[SegmentRequest, Segment]] = []

    async def abort_older(self, url: str, anchor: int) -> None:
        """The update comes some time after: what asks again meanwhile must not do so on the old prefix."""
        await super().abort_older(url, anchor)
        await anyio.sleep(3)

    async def sample(self, request: SegmentRequest) -> Segment:
        segment = await super().sample(request)
        self.seen.append((request, segment))
        return segment


class _Learner(ThetaLearner):
    """Theta is the version, so that every token says which weights it is of."""

    async def optimizer_step(self, *arguments: Any, **options: Any) -> Any:
        result = await super().optimizer_step(*arguments, **options)
        self.theta = self.version / 10
        return result


def _play(
    directory: Path, seed: int, kv_cache: rl.KVCache, *, pause_mode: PauseMode, max_staleness: int
) -> tuple[list[ScriptedServer], list[tuple[SegmentRequest, Segment]]]:
    (directory / "config.json").write_text('{"vocab_size": 256}')
    draw = random.Random(seed)
    servers = [
        ScriptedServer(
            tokens=lambda call: [65] * 9 + [END],
            seconds=lambda call: draw.choice([0.3, 1.0, 2.0, 7.0, 20.0]),
        )
        for _ in URLS
    ]
    sampler = _Sampler(URLS, transport=network(dict(zip(URLS, servers, strict=True))), seed=seed)
    learner = _Learner(lora_rank=None)
    learner.model_path = directory
    policy = rl.Policy(learner, sampler=sampler, publication="tensors", pause_mode=pause_mode)
    engine = rl.RolloutEngine(
        policy,
        env=_Env,
        renderer=ByteRenderer(),
        sampling_policy="segment",
        kv_cache=kv_cache,
        schedule=rl.Schedule(concurrency=12),
        budget=rl.Budget(max_turns=9, max_generated_tokens=200),
        seed=seed,
    )
    trainer = rl.AsyncTrainer(
        engine=engine, optimizer=rl.Adam(lr=1.0), groups_per_step=2, group_size=2, max_staleness=max_staleness
    )

    async def run() -> None:
        async for _ in trainer.run(list(range(8)), steps=8):
            pass

    run_virtual(run, seed=seed)
    return servers, sampler.seen


def _routes(server: ScriptedServer) -> list[str]:
    return [route for route, _ in server.calls]


def _crossed(seen: list[tuple[SegmentRequest, Segment]]) -> int:
    return sum(len(segment.versions) > 1 for _, segment in seen)


_REFILL_1 = rl.KVCache(max_staleness=1, on_limit="refill", allow_reprefill=True)
_REFILL_2 = rl.KVCache(max_staleness=2, on_limit="refill", allow_reprefill=True)
_RULES = [_REFILL_1, _REFILL_2, rl.KVCache(max_staleness=4)]


@pytest.mark.slow
@pytest.mark.usefixtures("threads_in_place")
@pytest.mark.parametrize("pause_mode", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("kv_cache", _RULES, ids=lambda rule: f"{rule.on_limit}-{rule.max_staleness}")
def test_no_token_is_sampled_on_a_prefix_older_than_the_rule(
    tmp_path: Path, kv_cache: rl.KVCache, pause_mode: PauseMode
) -> None:
    """Requests cross updates and prefixes are reused, within the bound; what would break it ends before the update.

    The namespace says whose context a request may reuse, and the spans whose weights its tokens are of.
    What does not have to be forgotten is not.
    """
    crossed, reused, ended = 0, 0, 0
    for seed in range(6):
        servers, seen = _play(tmp_path, seed, kv_cache, pause_mode=pause_mode, max_staleness=4)
        for request, segment in seen:
            assert request.anchor is not None
            assert request.extra_key == f"v{request.anchor}"
            for span in segment.versions:
                assert span.version - request.anchor <= kv_cache.max_staleness
                # In place nobody knows whose the first token is: it counts as the oldest's that it may be of.
                doubtful = pause_mode == "in_place" and span.start == 0
                tokens = slice(span.start + doubtful, span.end)
                expected = theta_logprobs(segment.tokens[tokens], span.version / 10)
                assert segment.logprobs[tokens] == pytest.approx(expected)
                if doubtful:
                    may_be = [theta_logprobs(segment.tokens[:1], v / 10)[0] for v in range(span.version, 9)]
                    assert np.isclose(segment.logprobs[0], may_be).any()
            ended += segment.stop is StopReason.ABORT
            newer = segment.versions and segment.versions[0].version > request.anchor
            reused += bool(newer) and segment.cached_tokens > 0
        crossed += _crossed(seen)
        assert all("/flush_cache" not in _routes(server) for server in servers)
        assert all(server.paused is None for server in servers)
    assert reused > 0
    assert crossed > 0 or pause_mode == "abort"
    assert ended > 0 or (kv_cache.on_limit == "hold" and pause_mode != "abort")


@pytest.mark.slow
@pytest.mark.usefixtures("threads_in_place")
@pytest.mark.parametrize("pause_mode", ["retract", "abort"])
def test_a_rule_that_allows_no_older_prefix_has_all_of_it_forgotten(tmp_path: Path, pause_mode: PauseMode) -> None:
    """Requests cross updates, and each time compute their context anew: the cache is flushed inside the pause."""
    crossed = 0
    for seed in range(3):
        kv_cache = rl.KVCache(max_staleness=0, on_limit="refill", allow_reprefill=True)
        servers, seen = _play(tmp_path, seed, kv_cache, pause_mode=pause_mode, max_staleness=4)
        crossed += _crossed(seen)
        for server in servers:
            routes = [route for route in _routes(server) if route != "/generate"]
            updates = [i for i, route in enumerate(routes) if route == "/end_weight_update"]
            assert updates and all(routes[i + 1] == "/flush_cache" for i in updates)
    assert crossed > 0 or pause_mode == "abort"


def test_what_must_end_before_an_update_follows_from_the_rule() -> None:
    """The worked example, and the two cases where everything is computed again."""
    rule = rl.KVCache(max_staleness=1)
    assert Prefixes.at_update(7, rule) == Prefixes(flush=False, oldest_anchor=6)
    anew = Prefixes(flush=True, oldest_anchor=None)
    assert Prefixes.at_update(7, None) == anew
    assert Prefixes.at_update(7, rl.KVCache(max_staleness=0, on_limit="refill", allow_reprefill=True)) == anew


def test_freezing_requests_where_no_older_context_is_allowed_is_refused() -> None:
    """Before anything is loaded; the message has both ways out."""
    policy = rl.Policy(ThetaLearner(lora_rank=None), sampler=SGLang(URLS), pause_mode="in_place")
    rule = rl.KVCache(max_staleness=0, on_limit="refill", allow_reprefill=True)
    with pytest.raises(ConfigError, match=r"pause_mode is 'in_place'.*retract.*kv_cache\.max_staleness of at least 1"):
        rl.RolloutEngine(policy, env=_Env, sampling_policy="segment", kv_cache=rule)
    rl.RolloutEngine(policy, env=_Env, sampling_policy="segment", kv_cache=rl.KVCache(max_staleness=1))


async def test_a_request_on_a_prefix_that_is_too_old_never_leaves() -> None:
    """It comes back as if it had been aborted at once, whatever made it late."""
    server = ScriptedServer()
    async with SGLang(URLS[:1], transport=network({URLS[0]: server})).opened() as sampler:
        await sampler.abort_older(URLS[0], 3)
        request = SegmentRequest(
            trajectory_id="t", input_ids=np.arange(3, dtype=np.int32), max_new_tokens=4, version=3, anchor=2
        )
        segment = await sampler.sample(request)
        assert (len(segment.tokens), segment.versions, segment.stop) == (0, (), StopReason.ABORT)
        assert server.generated == []
