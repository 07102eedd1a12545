"""Every way of publication, and updates under running requests, on a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import pytest

import asyncrl as rl
from asyncrl.learning.base import Learner, OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import loss_from
from asyncrl.publishing.carriers import Carrier, DiskCarrier, TensorCarrier
from asyncrl.publishing.distributed import DistributedCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.lora import AdapterCarrier, DiskAdapters, LoraPublisher, TensorAdapters
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.wire import PauseMode
from asyncrl.types import IntArray, Segment
from tests.realserver import RealServer, learning, sampling
from tests.tinymodels import CLOSE

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

BUCKET_BYTES = 20_000
# The tiny model has some 80 kB, so that there are several buckets.
PROMPT = np.arange(2, 42, dtype=np.int32)


async def _step(learner: Learner) -> None:
    """Learn to say the prompt."""
    mask = np.arange(len(PROMPT)) > 0
    zeros = np.zeros(len(PROMPT), dtype=np.float32)
    ages = np.zeros(len(PROMPT), dtype=np.int32)
    sequence = TrainingSequence(tokens=PROMPT, logprobs=zeros, mask=mask, ages=ages, advantage=1.0, weight=1.0)
    await learner.forward_backward([sequence], loss_from("policy_gradient"))
    adam = OptimizerSettings(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=None)
    await learner.optimizer_step(adam, divisor=float(mask.sum()))


def _request(
    version: int, *, prompt: IntArray = PROMPT, adapter: str | None = None, anchor: int | None = None, tokens: int = 8
) -> SegmentRequest:
    anchor = version if anchor is None else anchor
    return SegmentRequest(
        trajectory_id="t",
        input_ids=prompt,
        max_new_tokens=tokens,
        version=version,
        adapter=adapter,
        extra_key=f"v{anchor}",
        anchor=anchor,
    )


async def _assert_agree(learner: Learner, segment: Segment, *, prompt: IntArray = PROMPT) -> None:
    tokens = np.concatenate([prompt, segment.tokens])
    expected = await learner.logprobs(tokens, start=len(prompt), temperature=1.0)
    np.testing.assert_allclose(segment.logprobs, expected, atol=CLOSE)


_FULL: dict[str, Callable[[Learner, Path], Carrier]] = {
    "disk": DiskCarrier,
    "tensors": lambda learner, directory: TensorCarrier(learner, bucket_bytes=BUCKET_BYTES),
    "distributed": lambda learner, directory: DistributedCarrier(learner, phase_s=60.0, bucket_bytes=BUCKET_BYTES),
}


async def _publish_full(
    server: RealServer, directory: Path, carrier: Callable[[Learner, Path], Carrier], pause_mode: PauseMode
) -> list[str]:
    """Publish three versions with all that must be true after each; the servers' checksums."""
    checksums = []
    async with learning(server.model) as learner, sampling(server) as sampler:
        (control,) = sampler.live
        way = carrier(learner, directory)
        probe = Probe.for_model(server.model, tolerance=CLOSE)
        publisher = FullPublisher(learner, sampler, way, pause_mode=pause_mode, probe=probe)
        for version in range(3):
            await publisher.stage(version)
            assert await publisher.publish(version) <= CLOSE
            assert await control.weight_label() == sampler.labels.give(version)
            with anyio.fail_after(60):  # a paused server would not answer
                segment = await sampler.sample(_request(version))
            assert [span.version for span in segment.versions] == [version]
            await _assert_agree(learner, segment)
            checksums.append(await control.checksum())
            await _step(learner)
        if isinstance(way, DistributedCarrier):
            await way.close()
    return checksums


async def test_full_weights_arrive_the_same_on_every_way(sglang_server: RealServer, tmp_path: Path) -> None:
    """From disk, in requests and through a process group: three different versions, and the same three each time."""
    modes: list[PauseMode] = ["retract", "abort", "in_place"]
    found = {
        name: await _publish_full(sglang_server, tmp_path, carrier, mode)
        for (name, carrier), mode in zip(_FULL.items(), modes, strict=True)
    }
    assert len(set(found["disk"])) == 3
    assert found["disk"] == found["tensors"] == found["distributed"]


@pytest.mark.parametrize("way", ["disk", "tensors"])
async def test_adapters_arrive_and_stay_beside_each_other(sglang_server: RealServer, tmp_path: Path, way: str) -> None:
    """Each version under its own name; the base weights stay what they are, and so does their label."""
    async with (
        learning(sglang_server.model, rl.LoraConfig(r=8)) as learner,
        sampling(sglang_server) as sampler,
    ):
        (control,) = sampler.live
        before = await control.checksum()
        carrier: AdapterCarrier = DiskAdapters(learner, tmp_path) if way == "disk" else TensorAdapters(learner)
        probe = Probe.for_model(sglang_server.model, tolerance=CLOSE)
        publisher = LoraPublisher(learner, sampler, carrier, "run", probe=probe)
        publisher.pin(0)
        for version in range(4):
            await publisher.stage(version)
            assert await publisher.publish(version) <= CLOSE
            adapter = publisher.model_ref(version).adapter
            await _assert_agree(learner, await sampler.sample(_request(version, adapter=adapter)))
            if version < 3:
                await _step(learner)
        held = publisher.model_ref(0).adapter
        assert held in await control.adapters()
        first = await sampler.sample(_request(0, adapter=held))
        assert [span.version for span in first.versions] == [0]
        assert await control.checksum() == before
        assert await control.weight_label() == "default"


async def _cross(sampler: SGLang, publisher: FullPublisher, learner: Learner) -> list[tuple[IntArray, Segment]]:
    """Sample without a pause, eight requests at once, while version 1 is published; prompts and what crossed over."""
    crossed: list[tuple[IntArray, Segment]] = []
    done = False

    async def sample(number: int) -> None:
        prompt = np.roll(PROMPT, number)
        while not done:
            segment = await sampler.sample(_request(0, prompt=prompt, tokens=200))
            if len(segment.versions) > 1:
                crossed.append((prompt, segment))

    await _step(learner)
    await publisher.stage(1)
    (control,) = sampler.live
    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(sample, number)
        while (await control.load()).running < 4:
            await anyio.lowlevel.checkpoint()
        await publisher.publish(1)
        done = True
    return crossed


@pytest.mark.parametrize("pause_mode", ["retract", "in_place"])
async def test_requests_cross_an_update_and_their_tokens_say_so(
    sglang_server: RealServer, tmp_path: Path, pause_mode: PauseMode
) -> None:
    """Tokens before the switch are the old version's up to rounding, and none counts as newer than it is.

    What follows is of the new weights on context of the old ones, so of neither model alone.
    """
    async with (
        learning(sglang_server.model) as learner,
        learning(sglang_server.model) as old,
        sampling(sglang_server) as sampler,
    ):
        publisher = FullPublisher(
            learner,
            sampler,
            DiskCarrier(learner, tmp_path),
            pause_mode=pause_mode,
            kv_cache=rl.KVCache(max_staleness=1),
            probe=Probe.for_model(sglang_server.model, tolerance=CLOSE),
        )
        await publisher.stage(0)
        await publisher.publish(0)
        crossed = await _cross(sampler, publisher, learner)
        assert crossed
        late = 0.0
        for prompt, segment in crossed:
            assert [span.version for span in segment.versions] == [0, 1]
            switch = segment.versions[0].end
            tokens = np.concatenate([prompt, segment.tokens])
            differences = np.abs(segment.logprobs - await old.logprobs(tokens, start=len(prompt), temperature=1.0))
            # In place one token more counts as old than the server says is.
            assert differences[: switch - (pause_mode == "in_place")].max(initial=0.0) <= CLOSE
            late = max(late, float(differences[switch:].max(initial=0.0)))
        assert late > 10 * CLOSE


@pytest.mark.parametrize(("bound", "reused"), [(1, True), (0, False)])
async def test_a_prefix_is_reused_over_an_update_only_where_the_rule_allows_it(
    sglang_server: RealServer, tmp_path: Path, bound: int, reused: bool
) -> None:
    """By the server's own count of cached tokens: in the anchor's namespace, and never in that of another version."""
    rule = rl.KVCache(max_staleness=bound, on_limit="refill", allow_reprefill=True)
    async with learning(sglang_server.model) as learner, sampling(sglang_server) as sampler:
        publisher = FullPublisher(
            learner,
            sampler,
            DiskCarrier(learner, tmp_path),
            kv_cache=rule,
            probe=Probe.for_model(sglang_server.model, tolerance=CLOSE),
        )
        await publisher.stage(0)
        await publisher.publish(0)
        await sampler.sample(_request(0))
        await _step(learner)
        await publisher.stage(1)
        await publisher.publish(1)
        on_old = await sampler.sample(_request(1, anchor=0))
        assert (on_old.cached_tokens > 0) is reused
        anew = await sampler.sample(_request(1))
        assert anew.cached_tokens == 0
        await _assert_agree(learner, anew)
        again = await sampler.sample(_request(1))
        assert again.cached_tokens > 0
