"""How versions reach the servers: which publisher a run has, and what carries its versions.

A new method is a carrier in a file of its own and its name here.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

import anyio
import anyio.to_thread

from asyncrl.errors import ConfigError, require_choice, require_count
from asyncrl.learning.base import Learner
from asyncrl.publishing.base import Publisher
from asyncrl.publishing.carriers import Carrier, DiskCarrier, TensorCarrier
from asyncrl.publishing.distributed import DistributedCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.lora import AdapterCarrier, DiskAdapters, LoraPublisher, TensorAdapters
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.rolling import RollingPublisher
from asyncrl.publishing.staging import Folders
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.labels import Writer
from asyncrl.sampling.wire import PauseMode
from asyncrl.scheduling.rules import KVCache

__all__ = ["Home", "Publication", "PublicationOptions", "make_publisher"]

Publication: TypeAlias = Literal["disk", "tensors", "distributed"]
"""How a version travels: in a folder that servers read, in requests, or (full weights) through a process group."""

_PHASES = 5
# Of a publication through a process group: waiting for pauses, joining, sending; and once more, server by server.
_LEAVE_S = 5.0
# For unloading what servers need no longer when the run ends.


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationOptions:
    """What ``Policy`` was told about publications; see there."""

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

    def check(self, *, lora: bool, embedded: bool) -> None:
        """Refuse what cannot carry an adapter, or reach the embedded server; ``ConfigError``."""
        if self.method == "distributed" and lora:
            raise ConfigError(
                "publication.method is 'distributed', which sends all weights, and the learner trains a LoRA adapter: "
                "use 'disk' or 'tensors'"
            )
        if self.method == "tensors" and embedded:
            raise ConfigError(
                "publication.method is 'tensors', which the embedded server does not take: use 'disk', or SGLang "
                "servers"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a run writes its versions, and whose they are."""

    directory: Path
    is_temporary: bool
    """True if nobody wants the newest version left there as the result."""
    own: bool
    """True if what an earlier process has left there is this run's."""
    writer: Writer


async def make_publisher(
    options: PublicationOptions,
    learner: Learner,
    fleet: ServerFleet,
    home: Home,
    stack: AsyncExitStack,
    *,
    kv_cache: KVCache | None,
) -> Publisher:
    """What publishes ``learner``'s versions to ``fleet``; what is to be done at the end of the run goes to ``stack``.

    ``kv_cache``: the rule by which trajectories move to newer weights, None if they never do.
    """
    make_probe = partial(Probe.for_model, learner.model_path, tolerance=options.probe_tolerance)
    probe, writer = await anyio.to_thread.run_sync(make_probe), home.writer
    publisher: LoraPublisher | RollingPublisher | FullPublisher
    if learner.lora_rank is not None:
        adapters = _adapters(options, learner, home)
        publisher = LoraPublisher(learner, fleet, adapters, options.name, probe=probe, writer=writer)
        if not fleet.starts_servers:
            stack.push_async_callback(_leave, publisher)
    else:
        carrier = _carrier(options, learner, fleet, home, stack)
        if kv_cache is None and len(fleet.urls) > 1:
            publisher = RollingPublisher(learner, fleet, carrier, probe=probe, writer=writer)
        else:
            mode = options.pause_mode
            publisher = FullPublisher(
                learner, fleet, carrier, pause_mode=mode, kv_cache=kv_cache, probe=probe, writer=writer
            )
    if options.method == "disk" or home.is_temporary:
        return publisher

    async def leave_result(
        kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """What a publication from disk leaves by itself; nothing if the run failed."""
        if error is None and publisher.newest >= 0:
            await Folders(learner, home.directory).stage(publisher.newest)

    stack.push_async_exit(leave_result)
    return publisher


def _adapters(options: PublicationOptions, learner: Learner, home: Home) -> AdapterCarrier:
    """How an adapter travels."""
    if options.method == "disk":
        return DiskAdapters(learner, home.directory, own=home.own)
    return TensorAdapters(learner)


def _carrier(
    options: PublicationOptions, learner: Learner, fleet: ServerFleet, home: Home, stack: AsyncExitStack
) -> Carrier:
    """How all weights travel."""
    if options.method == "disk":
        return DiskCarrier(learner, home.directory, own=home.own)
    if options.method == "tensors":
        return TensorCarrier(learner, bucket_bytes=options.bucket_bytes)
    phase_s = fleet.timeouts.publication_s / _PHASES
    carrier = DistributedCarrier(learner, phase_s=phase_s, bucket_bytes=options.bucket_bytes)
    stack.push_async_callback(carrier.close)
    return carrier


async def _leave(publisher: LoraPublisher) -> None:
    """Servers of somebody else's go on without us."""
    with anyio.move_on_after(_LEAVE_S, shield=True):
        await publisher.leave()
