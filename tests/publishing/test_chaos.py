"""Servers that die, restart, hang and lose answers while versions are published and trajectories sample."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import numpy as np
import pytest

from asyncrl.publishing.base import Publisher
from asyncrl.publishing.carriers import DiskCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.clock import run_virtual
from asyncrl.testing.server import Fault, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, theta_logprobs
from asyncrl.types import Segment

pytestmark = pytest.mark.slow

PROBE = Probe(tokens=np.arange(8, dtype=np.int32))
ROUTES = ["/generate", "/load_lora_adapter", "/unload_lora_adapter", "/update_weights_from_disk", "/flush_cache"]
FAULTS = [Fault(status=503), Fault(drop=True), Fault(lose=True)]
VERSIONS, SERVERS, TRAJECTORIES = 12, 3, 12


class _World:
    """One run. ``segments`` has what was sampled, with the version that it was asked of."""

    def __init__(self, directory: Path, seed: int, *, lora: bool) -> None:
        self.random = random.Random(seed)
        self.servers = {
            f"http://s{number}": ScriptedServer(seconds=lambda call: self.random.expovariate(0.5))
            for number in range(SERVERS)
        }
        self.learner = ThetaLearner()
        self.sampler = SGLang(list(self.servers), transport=network(self.servers), retries=20)
        self.publisher: Publisher = (
            LoraPublisher(self.learner, self.sampler, DiskAdapters(self.learner, directory), "run", probe=PROBE)
            if lora
            else FullPublisher(self.learner, self.sampler, DiskCarrier(self.learner, directory), probe=PROBE)
        )
        self.published = -1
        self.segments: list[Segment] = []

    async def run(self) -> None:
        """Publish all versions; everything else goes on until they are."""
        async with self.sampler.opened():
            await self._publish(0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._break_things)
                for number in range(TRAJECTORIES):
                    tasks.start_soon(self._trajectory, number)
                for version in range(1, VERSIONS):
                    await anyio.sleep(self.random.uniform(1, 20))
                    await self._publish(version)
                tasks.cancel_scope.cancel()

    async def _publish(self, version: int) -> None:
        self.learner.theta = version / 10
        await self.publisher.stage(version)
        await self.publisher.publish(version)
        self.published = version

    async def _trajectory(self, number: int) -> None:
        while True:
            version = self.published
            self.publisher.pin(version)
            for _ in range(self.random.randint(1, 6)):
                ref = self.publisher.model_ref(version)
                request = SegmentRequest(
                    trajectory_id=str(number),
                    input_ids=np.array([number], dtype=np.int32),
                    max_new_tokens=4,
                    version=version,
                    adapter=ref.adapter,
                    extra_key=ref.extra_key,
                )
                self.segments.append(await self.sampler.sample(request))
            self.publisher.unpin(version)

    async def _break_things(self) -> None:
        while True:
            await anyio.sleep(self.random.expovariate(0.5))
            server = self.random.choice(list(self.servers.values()))
            match self.random.randrange(3):
                case 0:
                    server.fault(self.random.choice(ROUTES), self.random.choice(FAULTS))
                case 1:
                    server.restart()
                case 2:
                    server.down = True
                    await anyio.sleep(self.random.expovariate(0.1))
                    server.down = False


def _check(segment: Segment) -> None:
    for span in segment.versions:
        tokens = slice(span.start, span.end)
        expected = theta_logprobs(segment.tokens[tokens], span.version / 10)
        np.testing.assert_array_equal(segment.logprobs[tokens], expected)


@pytest.mark.parametrize("seed", range(8))
def test_every_adapter_segment_is_of_the_version_that_it_says(
    tmp_path: Path, seed: int, threads_in_place: None
) -> None:
    """Whatever breaks in whatever order, no token comes from other weights, and nothing piles up."""
    world = _World(tmp_path, seed, lora=True)
    run_virtual(world.run, seed=seed)
    assert len(world.segments) > 50
    for segment in world.segments:
        assert len(segment.versions) == 1
        _check(segment)


@pytest.mark.parametrize("seed", range(8))
def test_every_segment_of_full_weights_is_of_the_versions_that_it_says(
    tmp_path: Path, seed: int, threads_in_place: None
) -> None:
    """A token of a server that came back with other weights is never taken for one of ours."""
    world = _World(tmp_path, seed, lora=False)
    run_virtual(world.run, seed=seed)
    assert len(world.segments) > 50
    for segment in world.segments:
        _check(segment)
    assert any(len(segment.versions) == 2 for segment in world.segments)
