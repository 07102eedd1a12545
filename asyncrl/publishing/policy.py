"""The policy: the model being trained, as a learner, a sampler and a publisher under one version."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from asyncrl.concurrency.endings import FirstErrorStack
from asyncrl.errors import ConfigError, require_count
from asyncrl.events import Events, Underway
from asyncrl.learning.base import Learner, model_vocab_size
from asyncrl.publishing.base import BUCKET_BYTES, Publisher
from asyncrl.publishing.full import check_pause_mode
from asyncrl.publishing.home import Home
from asyncrl.publishing.methods import Publication, Publishing
from asyncrl.sampling.backend import SamplingBackend, as_backend
from asyncrl.sampling.base import Sampler
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.wire import PauseMode
from asyncrl.scheduling.rules import KVCache

__all__ = ["OpenPolicy", "Policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPolicy:
    """A policy that is up: the model is loaded and the servers answer. No version is published yet."""

    learner: Learner
    sampler: SamplingBackend
    publisher: Publisher


class Policy:
    """What is trained and sampled. Each run starts from the model in the learner's folder.

    ``learner``: the parameters, for example ``rl.TorchLearner("models/qwen")``.
    ``sampler``: ``rl.SGLang([..urls..])``; None starts the embedded server in a process of its own on this machine,
    with ``sampler_threads`` threads of torch.
    ``directory``: where published versions are written, readable by the servers; the newest is left there as the
    result. None is a temporary folder. With another ``publication`` than "disk" it gets the result only.
    ``publication``: how versions reach the servers. "tensors" and "distributed" need no common file system.
    ``bucket_bytes``: bytes of one piece of the weights with these methods: memory that an update needs on both sides.
    ``name``: how the names of adapters begin on the servers. What tells runs apart comes after it.
    ``pause_mode``: what an update of all weights does to requests under way: "retract" computes them again later,
    "in_place" freezes them, "abort" ends them with what they have.
    ``probe_tolerance``: largest difference between the servers' and the learner's log-probabilities of the probe tokens
    after a publication; the default is for float32 on both sides.
    ``publisher``: None publishes LoRA adapters if the learner trains one, else full weights; these on two or more
    servers version by version, so that trajectories can keep theirs.
    """

    def __init__(  # noqa: PLR0913  the options of publication; each is one sentence above
        self,
        learner: Learner,
        *,
        sampler: Sampler | None = None,
        publisher: Publisher | None = None,
        directory: Path | str | None = None,
        name: str = "policy",
        sampler_threads: int = 1,
        publication: Publication = "disk",
        bucket_bytes: int = BUCKET_BYTES,
        pause_mode: PauseMode = "retract",
        probe_tolerance: float = 1e-3,
    ) -> None:
        require_count("sampler.threads", sampler_threads, least=1)
        if publication == "tensors" and sampler is None:
            raise ConfigError(
                "publication.method is 'tensors', which the embedded server does not take: use 'disk', or SGLang "
                "servers"
            )
        self._publishing = Publishing(
            learner=learner,
            method=publication,
            name=name,
            bucket_bytes=bucket_bytes,
            pause_mode=pause_mode,
            probe_tolerance=probe_tolerance,
        )
        self.learner = learner
        self._sampler = as_backend(sampler or SGLang.embedded(learner.model_path, threads=sampler_threads))
        if publisher is None and self._sampler.fleet is None:
            raise TypeError("a sampler other than rl.SGLang needs a publisher of its own")
        self._publisher = publisher
        self._directory = None if directory is None else Path(directory).resolve()
        self._in_use = False

    @property
    def opens_connections(self) -> bool:
        """True if each sampling request has a connection of its own."""
        return self._sampler.opens_connections

    def keeps_versions(self, kv_cache: KVCache | None) -> bool:
        """True if a trajectory can keep its version while newer ones are published.

        ``kv_cache``: the rule by which trajectories move to newer weights, None if they never do. How many servers a
        source has may be seen only when it is opened.
        """
        if self._publisher is not None:
            return self._publisher.pins_versions
        return self.learner.lora_rank is not None or (self._sampler.may_be_many and kv_cache is None)

    def check_kv_cache(self, kv_cache: KVCache | None) -> None:
        """Refuse a rule of prefixes that updates of the weights would break; ``ConfigError``."""
        if self._publisher is None and self.learner.lora_rank is None:
            check_pause_mode(self._publishing.pause_mode, kv_cache)

    @asynccontextmanager
    async def opened(
        self, events: Events, *, kv_cache: KVCache | None = None, versions_in: Path | None = None
    ) -> AsyncGenerator[OpenPolicy, None]:
        """Load the model and start or reach the servers; end them at the exit.

        ``kv_cache``: the rule by which trajectories move to newer weights, None if they never do.
        ``versions_in``: where published versions are written, unless the policy has a folder of its own. Whoever uses
        ``versions_in`` again is the same run, resumed.

        What happens to servers is reported in ``events``. Servers that were given are asked first, so that a wrong URL
        is refused before anything is loaded; one of our own starts while the model is loaded.
        """
        if self._in_use:
            raise ConfigError("the policy is in use: one run at a time can train or sample it")
        async with FirstErrorStack() as stack:
            self._in_use = True
            stack.callback(self._free)
            home, vocab_size = None, None
            if self._publisher is None:
                home = await anyio.to_thread.run_sync(Home.taken, stack, self._directory, versions_in)
                # Some servers do not survive ids outside of the vocabulary.
                vocab_size = await anyio.to_thread.run_sync(model_vocab_size, self.learner.model_path)
            servers = self._sampler.opened(vocab_size=vocab_size, events=events)
            if not self._sampler.starts_servers:
                await stack.enter_async_context(servers)
            what = "loading the model" + (" and starting servers" if self._sampler.starts_servers else "")
            events.emit(Underway(time=anyio.current_time(), what=what))
            loaded = anyio.Event()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.push_async_callback(self.learner.close)
            tasks.start_soon(self._load, loaded)
            if self._sampler.starts_servers:
                await stack.enter_async_context(servers)
            await loaded.wait()
            publisher, fleet = self._publisher, self._sampler.fleet
            if publisher is None:
                assert home is not None and fleet is not None, "without servers a policy has a publisher of its own"
                publisher = await self._publishing.publisher(fleet, home, stack, kv_cache=kv_cache)
            yield OpenPolicy(learner=self.learner, sampler=self._sampler, publisher=publisher)

    def _free(self) -> None:
        self._in_use = False

    async def _load(self, loaded: anyio.Event) -> None:
        await self.learner.open()
        loaded.set()
