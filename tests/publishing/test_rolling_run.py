"""A whole run with all weights on two servers at different versions, trajectories pinned."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import anyio
import numpy as np
import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.learning.base import OptimizerSettings
from asyncrl.publishing.carriers import DiskCarrier
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.rolling import RollingPublisher
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing import ByteRenderer, run_virtual
from asyncrl.testing.server import GenerateCall, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, theta_logprobs
from asyncrl.types import Message, Row, Step, Trajectory

PROBE = Probe(tokens=np.arange(8, dtype=np.int32))


class _Learner(ThetaLearner):
    """Whose parameters say their version."""

    def __init__(self) -> None:
        super().__init__(lora_rank=None)

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        result = await super().optimizer_step(settings, divisor=divisor)
        self.theta = self.version / 10
        return result


class _Env(rl.Env):
    """Three turns, and a tool of random length between two of them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        await anyio.sleep(self._rng.expovariate(0.2))
        return None if traj.turns == 3 else [{"role": "user", "content": "on"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.member)


@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_every_trajectory_is_of_one_version_within_the_bound(
    seed: int, servers: int, tmp_path: Path, threads_in_place: None
) -> None:
    """The log-probabilities say which weights answered: those of the version that the trajectory began with."""
    rng = random.Random(seed)
    steps: list[Step] = []

    def seconds(call: GenerateCall) -> float:
        return rng.expovariate(0.5) if call.sampling_params["max_new_tokens"] > 1 else 0.1

    async def main() -> None:
        urls = {f"http://s{number}": ScriptedServer(seconds=seconds) for number in range(servers)}
        learner = _Learner()
        sampler = SGLang(list(urls), transport=network(urls))
        publisher = RollingPublisher(learner, sampler, DiskCarrier(learner, tmp_path), probe=PROBE)
        engine = rl.RolloutEngine(
            rl.Policy(learner, sampler=sampler, publisher=publisher),
            env=lambda: _Env(rng),
            renderer=ByteRenderer(),
            budget=rl.Budget(max_turns=3, max_turn_tokens=8),
        )
        trainer = rl.AsyncTrainer(
            engine=engine, groups_per_step=2, group_size=2, max_staleness=2, optimizer=rl.Adam(lr=1e-3)
        )
        steps.extend([step async for step in trainer.run(list(range(8)), steps=12)])

    run_virtual(main, seed=seed)
    ages = []
    for step in steps:
        for member in step.trajectories:
            (version,) = {span.version for span in member.spans if span.version is not None}
            ages.append(step.model_step - 1 - version)
            for span in member.spans:
                if span.logprobs is not None:
                    assert np.array_equal(span.logprobs, theta_logprobs(span.tokens, version / 10))
    assert len(steps) == 12
    assert max(ages) <= 2
    assert max(ages) >= 1


def test_one_server_is_refused_with_the_choices() -> None:
    """Known from a list before anything starts."""
    learner = ThetaLearner(lora_rank=None)

    def trainer(*urls: str) -> None:
        engine = rl.RolloutEngine(
            rl.Policy(learner, sampler=SGLang(urls)), env=lambda: _Env(random.Random(0)), renderer=ByteRenderer()
        )
        rl.AsyncTrainer(engine=engine, groups_per_step=1, group_size=2, optimizer=rl.Adam(lr=1e-3))

    with pytest.raises(ConfigError, match="sample on two or more servers"):
        trainer("http://one:1")
    trainer("http://one:1", "http://two:1")
