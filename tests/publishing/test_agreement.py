"""The learner, sharing what sequences begin with, gives the tokens of a sampler the log-probabilities that it had."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest

import asyncrl as rl
from asyncrl.learning.base import OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import loss_from
from asyncrl.publishing.carriers import DiskCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.types import IntArray
from tests.realserver import RealServer, learning, sampling

LEAST_TOKENS = 1000
CLOSE = 1e-4
"""Largest difference in float32; each side is some 1e-6 off."""
Agree = Callable[[SGLang, Path, Path], Awaitable[None]]
ADAM = OptimizerSettings(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=None)


@asynccontextmanager
async def _embedded(model: Path) -> AsyncGenerator[SGLang, None]:
    from asyncrl.servers.embedded.app import create_app
    from asyncrl.servers.embedded.options import ServerOptions

    app = create_app(ServerOptions(model=model))
    sampler = SGLang(["http://embedded"], transport=httpx.ASGITransport(app))
    async with app.router.lifespan_context(app), sampler.opened():
        yield sampler


async def _group(
    sampler: SGLang, prompt: IntArray, *, adapter: str | None, version: int, temperature: float
) -> list[TrainingSequence]:
    """Eight answers to one prompt."""
    sequences: list[TrainingSequence] = []

    async def answer(member: int) -> None:
        request = SegmentRequest(
            trajectory_id=str(member),
            input_ids=prompt,
            max_new_tokens=24,
            version=version,
            temperature=temperature,
            adapter=adapter,
            extra_key=f"v{version}",
        )
        segment = await sampler.sample(request)
        tokens = np.concatenate([prompt, segment.tokens])
        unsampled = np.full(len(prompt), -np.inf, dtype=np.float32)
        sequences.append(
            TrainingSequence(
                tokens=tokens,
                logprobs=np.concatenate([unsampled, segment.logprobs]),
                mask=np.arange(len(tokens)) >= len(prompt),
                ages=np.zeros(len(tokens), dtype=np.int32),
                advantage=1.0,
                weight=1.0,
                temperature=temperature,
            )
        )

    async with anyio.create_task_group() as tasks:
        for member in range(8):
            tasks.start_soon(answer, member)
    return sequences


async def _assert_agree(learner: rl.TorchLearner, sampler: SGLang, adapter: str | None, version: int) -> None:
    chance = np.random.default_rng(0)
    for temperature in (0.7, 1.0, 1.3):
        sequences: list[TrainingSequence] = []
        while sum(int(one.mask.sum()) for one in sequences) < LEAST_TOKENS:
            prompt = chance.integers(2, 64, 20).astype(np.int32)
            sequences += await _group(sampler, prompt, adapter=adapter, version=version, temperature=temperature)
        result = await learner.forward_backward(sequences, loss_from("cispo"))
        await learner.discard_gradients()
        assert result.tokens >= LEAST_TOKENS
        assert result.computed_tokens < 0.8 * result.input_tokens
        assert float(np.abs(result.log_ratios).max()) <= CLOSE


async def _assert_weights_agree(sampler: SGLang, model: Path, directory: Path) -> None:
    async with learning(model) as learner:
        publisher = FullPublisher(learner, sampler, DiskCarrier(learner, directory))
        await publisher.stage(0)
        await publisher.publish(0)
        await _assert_agree(learner, sampler, None, 0)


async def _assert_adapters_agree(sampler: SGLang, model: Path, directory: Path) -> None:
    """After a step of training, because a fresh adapter changes nothing."""
    async with learning(model, rl.LoraConfig(r=8)) as learner:
        publisher = LoraPublisher(learner, sampler, DiskAdapters(learner, directory), "run")
        for version in range(2):
            await publisher.stage(version)
            await publisher.publish(version)
            adapter = publisher.model_ref(version).adapter
            if version == 0:
                prompt = np.arange(2, 22, dtype=np.int32)
                group = await _group(sampler, prompt, adapter=adapter, version=0, temperature=1.0)
                await learner.forward_backward(group, loss_from("policy_gradient"))
                await learner.optimizer_step(ADAM, divisor=8.0)
            else:
                await _assert_agree(learner, sampler, adapter, 1)


@pytest.mark.slow
@pytest.mark.parametrize("agree", [_assert_weights_agree, _assert_adapters_agree])
async def test_the_embedded_server_agrees(tiny_model: Callable[..., Path], tmp_path: Path, agree: Agree) -> None:
    """Over 1,000 tokens at each of three temperatures, without and with an adapter."""
    model = tiny_model("qwen3")
    async with _embedded(model) as sampler:
        await agree(sampler, model, tmp_path)


@pytest.mark.sglang
@pytest.mark.timeout(600)
@pytest.mark.parametrize("agree", [_assert_weights_agree, _assert_adapters_agree])
async def test_a_real_server_agrees(sglang_server: RealServer, tmp_path: Path, agree: Agree) -> None:
    """The same."""
    async with sampling(sglang_server) as sampler:
        await agree(sampler, sglang_server.model, tmp_path)
