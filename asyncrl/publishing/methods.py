"""How versions reach the servers: which publisher a run has, and what carries its versions.

A new method is a carrier in a file of its own and its name here.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import anyio
import anyio.to_thread

from asyncrl.errors import ConfigError, require_choice, require_count
from asyncrl.learning.base import Learner
from asyncrl.publishing.base import Publisher
from asyncrl.publishing.carriers import Carrier, DiskCarrier, TensorCarrier
from asyncrl.publishing.distributed import DistributedCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.home import Home
from asyncrl.publishing.lora import AdapterCarrier, DiskAdapters, LoraPublisher, TensorAdapters
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.rolling import RollingPublisher
from asyncrl.publishing.staging import Folders, ServerPublisher
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.wire import PauseMode
from asyncrl.scheduling.rules import KVCache

__all__ = ["Publication", "Publishing"]

Publication: TypeAlias = Literal["disk", "tensors", "distributed"]
"""How a version travels: in a folder that servers read, in requests, or (full weights) through a process group."""

_PHASES = 5
# Of a publication through a process group: waiting for pauses, joining, sending; and once more, server by server.
_LEAVE_S = 5.0
# For unloading what servers need no longer when the run ends.


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """How the versions of ``learner`` are to reach servers; for the other fields see ``Policy``."""

    learner: Learner
    method: Publication
    name: str
    bucket_bytes: int
    pause_mode: PauseMode
    probe_tolerance: float

    def __post_init__(self) -> None:
        require_choice("publication.method", self.method, Publication)
        require_choice("publication.pause_mode", self.pause_mode, PauseMode)
        require_count("publication.bucket_bytes", self.bucket_bytes, least=1)
        if not self.probe_tolerance > 0:
            raise ConfigError.for_value("publication.probe_tolerance", self.probe_tolerance, "more than 0")
        if self.method == "distributed" and self.learner.lora_rank is not None:
            raise ConfigError(
                "publication.method is 'distributed', which sends all weights, and the learner trains a LoRA adapter: "
                "use 'disk' or 'tensors'"
            )

    async def publisher(
        self, fleet: ServerFleet, home: Home, stack: AsyncExitStack, *, kv_cache: KVCache | None
    ) -> Publisher:
        """What publishes to ``fleet``; what is to be done at the end of the run goes to ``stack``.

        ``kv_cache``: the rule by which trajectories move to newer weights, None if they never do.
        """
        make_probe = partial(Probe.for_model, self.learner.model_path, tolerance=self.probe_tolerance)
        probe, writer = await anyio.to_thread.run_sync(make_probe), home.writer
        publisher: LoraPublisher | RollingPublisher | FullPublisher
        if self.learner.lora_rank is not None:
            publisher = LoraPublisher(self.learner, fleet, self._adapters(home), self.name, probe=probe, writer=writer)
            if not fleet.starts_servers:
                stack.push_async_callback(_leave, publisher)
        elif kv_cache is None and len(fleet.urls) > 1:
            carrier = self._carrier(fleet, home, stack)
            publisher = RollingPublisher(self.learner, fleet, carrier, probe=probe, writer=writer)
        else:
            publisher = FullPublisher(
                self.learner,
                fleet,
                self._carrier(fleet, home, stack),
                pause_mode=self.pause_mode,
                kv_cache=kv_cache,
                probe=probe,
                writer=writer,
            )
        if self.method != "disk" and not home.is_temporary:
            stack.push_async_exit(partial(_leave_result, publisher, Folders(self.learner, home.directory)))
        return publisher

    def _adapters(self, home: Home) -> AdapterCarrier:
        """What carries an adapter, by ``method``."""
        if self.method == "disk":
            return DiskAdapters(self.learner, home.directory, own=home.own)
        return TensorAdapters(self.learner)

    def _carrier(self, fleet: ServerFleet, home: Home, stack: AsyncExitStack) -> Carrier:
        """What carries all weights, by ``method``."""
        if self.method == "disk":
            return DiskCarrier(self.learner, home.directory, own=home.own)
        if self.method == "tensors":
            return TensorCarrier(self.learner, bucket_bytes=self.bucket_bytes)
        phase_s = fleet.timeouts.publication_s / _PHASES
        carrier = DistributedCarrier(self.learner, phase_s=phase_s, bucket_bytes=self.bucket_bytes)
        stack.push_async_callback(carrier.close)
        return carrier


async def _leave(publisher: LoraPublisher) -> None:
    """Unload the run's adapters from servers that others started, and that go on when the run has ended."""
    with anyio.move_on_after(_LEAVE_S, shield=True):
        await publisher.leave()


async def _leave_result(
    publisher: ServerPublisher, folders: Folders, kind: object, error: BaseException | None, traceback: object
) -> None:
    """Write the newest version to ``folders``, where publication from disk leaves it anyway; not if the run failed."""
    if error is None and publisher.newest >= 0:
        await folders.stage(publisher.newest)
