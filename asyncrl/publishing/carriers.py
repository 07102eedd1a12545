"""How all weights travel to one server: in a folder that it reads, or in the request.

A carrier moves bytes and no more: pausing, checking and going on are ``full``'s. The way through a process group, which
serves all servers at once, is in ``distributed``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from asyncrl.learning.base import Learner
from asyncrl.publishing.base import BUCKET_BYTES
from asyncrl.publishing.delivery import JointUpdate
from asyncrl.publishing.staging import Copies, Folders, Store
from asyncrl.sampling.control import ServerControl

__all__ = ["Carrier", "DiskCarrier", "TensorCarrier", "is_local", "payload", "plan"]


class Carrier(Protocol):
    """Replaces the base weights of servers. Real: ``DiskCarrier``, ``TensorCarrier``, ``DistributedCarrier``."""

    @property
    def store(self) -> Store:
        """Where versions are staged."""
        ...

    async def update(self, server: ServerControl, version: int, label: str, together: JointUpdate) -> None:
        """Replace the weights of ``server``, which is paused, by the staged ``version``, and label them.

        Raises ``SamplingError`` or ``PublicationError``; the weights may then be half replaced.
        """
        ...


class DiskCarrier:
    """Each server reads the version's folder, which has the same path there. ``own``: see ``Folders``."""

    def __init__(self, learner: Learner, directory: Path, *, own: bool = False) -> None:
        self.store = Folders(learner, directory, own=own)

    async def update(self, server: ServerControl, version: int, label: str, together: JointUpdate) -> None:
        """Have ``server`` read the folder of ``version``."""
        await server.update_from_disk(self.store.folder(version), label)


class TensorCarrier:
    """The weights are in the requests, in buckets of at most ``bucket_bytes``.

    Tensors on a GPU go to a server on this machine as handles, without being copied; otherwise their bytes travel.
    """

    def __init__(self, learner: Learner, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.store = Copies(learner)
        self._bucket_bytes = bucket_bytes
        self._ranks: dict[str, int] = {}
        # Making a bucket's bytes costs a processor and memory of three times its size.
        self._limiter = anyio.CapacityLimiter(2)

    async def update(self, server: ServerControl, version: int, label: str, together: JointUpdate) -> None:
        """Send the weights of ``version``, one bucket after the other."""
        if together.returning or server.url not in self._ranks:
            self._ranks[server.url] = await server.tensor_ranks()
        weights = self.store.weights(version)
        parts = await anyio.to_thread.run_sync(plan, weights, self._bucket_bytes, limiter=self._limiter)
        await server.begin_update()
        for number, names in enumerate(parts, start=1):
            bucket, text = await anyio.to_thread.run_sync(
                payload, weights, names, self.store.device, is_local(server.url), limiter=self._limiter
            )
            await server.update_from_tensors([text] * self._ranks[server.url], label if number == len(parts) else None)
            # Not before the answer: until then the server may read this memory.
            del bucket
        await server.end_update()


def is_local(url: str) -> bool:
    """True if the server at ``url`` runs on this machine, as far as its address says."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def plan(weights: Mapping[str, Any], bucket_bytes: int) -> list[list[str]]:
    """Which weights go together."""
    from asyncrl.publishing.torch_buckets import as_tensors, plan_buckets

    return plan_buckets(as_tensors(weights), bucket_bytes)


def payload(
    weights: Mapping[str, Any], names: Sequence[str] | None, device: str | None, by_handle: bool
) -> tuple[object, str]:
    """The weights of ``names`` as a bucket, and what a request says about it. None: all, which must be few."""
    from asyncrl.publishing import torch_buckets

    tensors = torch_buckets.as_tensors(weights)
    if names is None:
        # The widest types first, as in ``plan_buckets``.
        names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    bucket = torch_buckets.make_bucket(tensors, names, device if by_handle else "cpu")
    return bucket, torch_buckets.payload(bucket, by_handle=by_handle)
