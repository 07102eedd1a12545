"""The policy: the model being trained, as a learner, a sampler and a publisher under one version."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from asyncrl.errors import ConfigError
from asyncrl.events import Events
from asyncrl.learning.base import Learner
from asyncrl.publishing.base import Publisher
from asyncrl.publishing.disk import DiskPublisher
from asyncrl.publishing.lora import LoraPublisher
from asyncrl.publishing.probe import Probe, model_vocab_size
from asyncrl.sampling.base import Sampler
from asyncrl.sampling.launch import EmbeddedServer
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.wire import PauseMode

__all__ = ["OpenPolicy", "Policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPolicy:
    """A policy that is up: the model is loaded and the servers answer. No version is published yet."""

    learner: Learner
    sampler: Sampler
    publisher: Publisher


class Policy:
    """What is trained and sampled. Each run starts from the model in the learner's folder.

    ``learner``: the parameters, for example ``rl.TorchLearner("models/qwen")``.
    ``sampler``: ``rl.SGLang([..urls..])``; None starts the embedded server in a process of its own on this machine.
    ``directory``: where published versions are written, readable by the servers; the newest is left there as the
    result. None is a temporary folder.
    ``name``: prefix of adapter names on the servers; runs that share servers need different ones.
    ``pause_mode``: what an update of all weights does to requests under way.
    ``probe_tolerance``: largest difference between the servers' and the learner's log-probabilities of the probe tokens
    after a publication; the default is for float32 on both sides.
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
        pause_mode: PauseMode = "retract",
        probe_tolerance: float = 1e-3,
    ) -> None:
        self.learner = learner
        self._sampler = sampler
        self._publisher = publisher
        self._directory = None if directory is None else Path(directory).resolve()
        self._name = name
        self._sampler_threads = sampler_threads
        self._pause_mode: PauseMode = pause_mode
        self._probe_tolerance = probe_tolerance
        self._in_use = False

    @property
    def opens_connections(self) -> bool:
        """True if each sampling request has a connection of its own."""
        return self._sampler is None or isinstance(self._sampler, SGLang)

    @property
    def pins_versions(self) -> bool:
        """True if a trajectory can keep its version while newer ones are published."""
        return self.learner.lora_rank is not None if self._publisher is None else self._publisher.pins_versions

    @asynccontextmanager
    async def opened(self, events: Events) -> AsyncGenerator[OpenPolicy, None]:
        """Load the model and start or reach the servers; end them at the exit.

        What happens to servers is reported in ``events``. Servers that were given are asked first, so that a wrong URL
        is refused before anything is loaded; one of our own starts while the model is loaded.
        """
        if self._in_use:
            raise ConfigError("the policy is in use: one run at a time can train or sample it")
        async with AsyncExitStack() as stack:
            self._in_use = True
            stack.callback(self._free)
            sampler = self._sampler
            if isinstance(sampler, SGLang):
                stack.callback(sampler.events.subscribe(events.emit))
                await self._require_ids(sampler)
            if sampler is not None and not self._starts_servers:
                await stack.enter_async_context(sampler.opened())
            loaded = anyio.Event()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.push_async_callback(self.learner.close)
            tasks.start_soon(self._load, loaded)
            if sampler is None:
                server = EmbeddedServer(self.learner.model_path, threads=self._sampler_threads)
                url = await stack.enter_async_context(server)
                sampler = SGLang([url])
                stack.callback(sampler.events.subscribe(events.emit))
                await self._require_ids(sampler)
            if self._starts_servers:
                await stack.enter_async_context(sampler.opened())
            await loaded.wait()
            publisher = self._publisher or await self._make_publisher(sampler, self._versions_directory(stack))
            yield OpenPolicy(learner=self.learner, sampler=sampler, publisher=publisher)

    @property
    def _starts_servers(self) -> bool:
        """True if they need as long as the model to be there."""
        return self._sampler is None or (isinstance(self._sampler, SGLang) and self._sampler.starts_servers)

    async def _require_ids(self, sampler: SGLang) -> None:
        """Let the client refuse ids outside of the vocabulary, which some servers do not survive."""
        if sampler.vocab_size is None and self._publisher is None:
            sampler.vocab_size = await anyio.to_thread.run_sync(model_vocab_size, self.learner.model_path)

    def _free(self) -> None:
        self._in_use = False

    async def _load(self, loaded: anyio.Event) -> None:
        await self.learner.open()
        loaded.set()

    def _versions_directory(self, stack: AsyncExitStack) -> Path:
        if self._directory is not None:
            return self._directory
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-")))

    async def _make_publisher(self, sampler: Sampler, directory: Path) -> Publisher:
        if not isinstance(sampler, SGLang):
            raise TypeError("a sampler other than rl.SGLang needs a publisher of its own")
        make_probe = partial(Probe.for_model, self.learner.model_path, tolerance=self._probe_tolerance)
        probe = await anyio.to_thread.run_sync(make_probe)
        if self.learner.lora_rank is not None:
            return LoraPublisher(self.learner, sampler, directory, self._name, probe=probe)
        return DiskPublisher(self.learner, sampler, directory, pause_mode=self._pause_mode, probe=probe)
