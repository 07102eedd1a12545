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

from asyncrl.concurrency.endings import Endings
from asyncrl.errors import ConfigError, require_choice, require_count
from asyncrl.events import Events
from asyncrl.learning.base import Learner, model_vocab_size
from asyncrl.publishing.base import BUCKET_BYTES, Publication, Publisher
from asyncrl.publishing.carriers import Carrier, DiskCarrier, TensorCarrier
from asyncrl.publishing.distributed import DistributedCarrier
from asyncrl.publishing.full import FullPublisher, check_pause_mode
from asyncrl.publishing.home import owned, run_of
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher, TensorAdapters
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.rolling import RollingPublisher
from asyncrl.publishing.staging import Folders
from asyncrl.sampling.base import Sampler
from asyncrl.sampling.labels import Writer
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.wire import PauseMode
from asyncrl.scheduling.rules import KVCache

__all__ = ["OpenPolicy", "Policy"]

_PHASES = 5
# Of a publication through a process group: waiting for pauses, joining, sending; and once more, server by server.
_LEAVE_S = 5.0
# For unloading what servers need no longer when the run ends.


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
    result. None is a temporary folder. With another ``publication`` than "disk" it gets the result only.
    ``publication``: how versions reach the servers. "tensors" and "distributed" need no common file system.
    ``bucket_bytes``: of one piece of the weights on these ways.
    ``name``: how the names of adapters begin on the servers. What tells runs apart comes after it.
    ``pause_mode``: what an update of all weights does to requests under way.
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
        require_choice("publication.way", publication, Publication)
        require_choice("publication.pause_mode", pause_mode, PauseMode)
        require_count("publication.bucket_bytes", bucket_bytes, least=1)
        if not probe_tolerance > 0:
            raise ConfigError.for_value("publication.probe_tolerance", probe_tolerance, "more than 0")
        if publication == "distributed" and learner.lora_rank is not None:
            raise ConfigError(
                "publication.way is 'distributed', which sends all weights, and the learner trains a LoRA adapter: use "
                "'disk' or 'tensors'"
            )
        if publication == "tensors" and sampler is None:
            raise ConfigError(
                "publication.way is 'tensors', which the embedded server does not take: use 'disk', or SGLang servers"
            )
        self.learner = learner
        self._sampler = sampler
        self._publisher = publisher
        self._directory = None if directory is None else Path(directory).resolve()
        self._name = name
        self._resumed_in: Path | None = None
        self._sampler_threads = sampler_threads
        self._publication = publication
        self._bucket_bytes = bucket_bytes
        self._pause_mode: PauseMode = pause_mode
        self._probe_tolerance = probe_tolerance
        self._in_use = False

    @property
    def opens_connections(self) -> bool:
        """True if each sampling request has a connection of its own."""
        return self._sampler is None or isinstance(self._sampler, SGLang)

    def keeps_versions(self, kv_cache: KVCache | None) -> bool:
        """True if a trajectory can keep its version while newer ones are published.

        ``kv_cache``: the rule by which trajectories move to newer weights, None if they never do. How many servers a
        source has may be seen only when it is opened.
        """
        if self._publisher is not None:
            return self._publisher.pins_versions
        many = isinstance(self._sampler, SGLang) and self._sampler.may_be_many
        return self.learner.lora_rank is not None or (many and kv_cache is None)

    def keep_versions_in(self, directory: Path) -> None:
        """Write published versions there, unless the policy was given a folder of its own.

        Whoever uses ``directory`` again is the same run, resumed.
        """
        self._resumed_in = directory.resolve()
        if self._directory is None:
            self._directory = self._resumed_in

    def check_kv_cache(self, kv_cache: KVCache | None) -> None:
        """Refuse a rule of prefixes that updates of the weights would break; ``ConfigError``."""
        if self._publisher is None and self.learner.lora_rank is None:
            check_pause_mode(self._pause_mode, kv_cache)

    @asynccontextmanager
    async def opened(self, events: Events, *, kv_cache: KVCache | None = None) -> AsyncGenerator[OpenPolicy, None]:
        """Load the model and start or reach the servers; end them at the exit.

        ``kv_cache``: the rule by which trajectories move to newer weights, None if they never do.

        What happens to servers is reported in ``events``. Servers that were given are asked first, so that a wrong URL
        is refused before anything is loaded; one of our own starts while the model is loaded.
        """
        if self._in_use:
            raise ConfigError("the policy is in use: one run at a time can train or sample it")
        async with Endings() as stack:
            self._in_use = True
            stack.callback(self._free)
            writer = Writer() if self._publisher else await anyio.to_thread.run_sync(self._own, stack)
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
                from asyncrl.servers.launch import EmbeddedServer

                server = EmbeddedServer(self.learner.model_path, threads=self._sampler_threads)
                url = await stack.enter_async_context(server)
                sampler = SGLang([url])
                stack.callback(sampler.events.subscribe(events.emit))
                await self._require_ids(sampler)
            if self._starts_servers:
                await stack.enter_async_context(sampler.opened())
            await loaded.wait()
            publisher = self._publisher or await self._make_publisher(sampler, stack, kv_cache, writer)
            if isinstance(publisher, LoraPublisher) and not self._starts_servers:
                stack.push_async_callback(_leave, publisher)
            yield OpenPolicy(learner=self.learner, sampler=sampler, publisher=publisher)
            if isinstance(publisher, FullPublisher | LoraPublisher | RollingPublisher) and self._publication != "disk":
                await self._leave_result(publisher.newest)

    @property
    def _starts_servers(self) -> bool:
        """True if they need as long as the model to be there."""
        return self._sampler is None or (isinstance(self._sampler, SGLang) and self._sampler.starts_servers)

    async def _require_ids(self, sampler: SGLang) -> None:
        """Let the client refuse ids outside of the vocabulary, which some servers do not survive."""
        if sampler.vocab_size is None and self._publisher is None:
            sampler.vocab_size = await anyio.to_thread.run_sync(model_vocab_size, self.learner.model_path)

    def _own(self, stack: AsyncExitStack) -> Writer:
        """Take the folder of the versions into use; whose versions they are."""
        if self._directory is not None:
            stack.enter_context(owned(self._directory))
        return Writer() if self._resumed_in is None else Writer(run=run_of(self._resumed_in))

    def _free(self) -> None:
        self._in_use = False

    async def _load(self, loaded: anyio.Event) -> None:
        await self.learner.open()
        loaded.set()

    def _versions_directory(self, stack: AsyncExitStack) -> Path:
        if self._directory is not None:
            return self._directory
        temporary = tempfile.TemporaryDirectory(prefix="asyncrl-")
        stack.callback(temporary.cleanup)
        return Path(temporary.name)

    @property
    def _owns_leftovers(self) -> bool:
        """True if versions that are on disk already are this run's, from before it was resumed."""
        return self._resumed_in is not None and self._directory == self._resumed_in

    async def _leave_result(self, version: int) -> None:
        """What a publication from disk leaves by itself."""
        if self._directory is not None and version >= 0:
            await Folders(self.learner, self._directory).stage(version)

    async def _make_publisher(
        self, sampler: Sampler, stack: AsyncExitStack, kv_cache: KVCache | None, writer: Writer
    ) -> Publisher:
        if not isinstance(sampler, SGLang):
            raise TypeError("a sampler other than rl.SGLang needs a publisher of its own")
        make_probe = partial(Probe.for_model, self.learner.model_path, tolerance=self._probe_tolerance)
        probe = await anyio.to_thread.run_sync(make_probe)
        if self.learner.lora_rank is not None:
            adapters = (
                DiskAdapters(self.learner, self._versions_directory(stack), own=self._owns_leftovers)
                if self._publication == "disk"
                else TensorAdapters(self.learner)
            )
            return LoraPublisher(self.learner, sampler, adapters, self._name, probe=probe, writer=writer)
        carrier = self._carrier(sampler, stack)
        if kv_cache is None and len(sampler.urls) > 1:
            return RollingPublisher(self.learner, sampler, carrier, probe=probe, writer=writer)
        return FullPublisher(
            self.learner,
            sampler,
            carrier,
            pause_mode=self._pause_mode,
            kv_cache=kv_cache,
            probe=probe,
            writer=writer,
        )

    def _carrier(self, sampler: SGLang, stack: AsyncExitStack) -> Carrier:
        """How all weights travel."""
        if self._publication == "disk":
            return DiskCarrier(self.learner, self._versions_directory(stack), own=self._owns_leftovers)
        if self._publication == "tensors":
            return TensorCarrier(self.learner, bucket_bytes=self._bucket_bytes)
        phase_s = sampler.timeouts.publication_s / _PHASES
        carrier = DistributedCarrier(self.learner, phase_s=phase_s, bucket_bytes=self._bucket_bytes)
        stack.push_async_callback(carrier.close)
        return carrier


async def _leave(publisher: LoraPublisher) -> None:
    """Servers of somebody else's go on without us."""
    with anyio.move_on_after(_LEAVE_S, shield=True):
        await publisher.leave()
