"""The policy: the model being trained, as a learner, a sampler and a publisher under one version."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio

from asyncrl.learning.base import Learner
from asyncrl.publishing.base import Publisher
from asyncrl.publishing.disk import DiskPublisher
from asyncrl.publishing.lora import LoraPublisher
from asyncrl.sampling.base import Sampler
from asyncrl.sampling.launch import EmbeddedServer
from asyncrl.sampling.sglang import SGLang

__all__ = ["OpenPolicy", "Policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPolicy:
    """A policy that is up: the model is loaded and the servers answer. No version is published yet."""

    learner: Learner
    sampler: Sampler
    publisher: Publisher


class Policy:
    """What is trained and sampled.

    ``learner``: the parameters, for example ``rl.TorchLearner("models/qwen")``.
    ``sampler``: ``rl.SGLang([..urls..])``; None starts the embedded server in a process of its own on this machine.
    ``directory``: where published versions are written, readable by the servers; None is a temporary folder.
    ``name``: prefix of adapter names on the servers; runs that share servers need different ones.
    ``publisher``: None publishes LoRA adapters if the learner trains one, else full weights from disk.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        sampler: Sampler | None = None,
        publisher: Publisher | None = None,
        directory: Path | str | None = None,
        name: str = "policy",
        sampler_threads: int = 1,
        pause_mode: Literal["abort", "retract", "in_place"] = "retract",
    ) -> None:
        self.learner = learner
        self._sampler = sampler
        self._publisher = publisher
        self._directory = None if directory is None else Path(directory)
        self._name = name
        self._sampler_threads = sampler_threads
        self._pause_mode = pause_mode

    @property
    def pins_versions(self) -> bool:
        """True if a trajectory can keep its version while newer ones are published."""
        return self.learner.lora_rank is not None if self._publisher is None else self._publisher.pins_versions

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[OpenPolicy, None]:
        """Load the model and start or reach the servers, both at once; end them at the exit."""
        loaded = anyio.Event()

        async def load() -> None:
            await self.learner.open()
            loaded.set()

        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.push_async_callback(self.learner.close)
            tasks.start_soon(load)
            sampler = self._sampler
            if sampler is None:
                server = EmbeddedServer(self.learner.model_path, threads=self._sampler_threads)
                sampler = SGLang([await stack.enter_async_context(server)])
            await stack.enter_async_context(sampler.opened())
            await loaded.wait()
            publisher = self._publisher
            if publisher is None:
                directory = self._directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-")))
                publisher = self._make_publisher(sampler, directory)
            yield OpenPolicy(learner=self.learner, sampler=sampler, publisher=publisher)

    def _make_publisher(self, sampler: Sampler, directory: Path) -> Publisher:
        if not isinstance(sampler, SGLang):
            raise TypeError("a sampler other than rl.SGLang needs a publisher of its own")
        if self.learner.lora_rank is not None:
            return LoraPublisher(self.learner, sampler, directory, self._name)
        return DiskPublisher(self.learner, sampler, directory, pause_mode=self._pause_mode)
