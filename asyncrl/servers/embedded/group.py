"""The server's side of a process group through which a trainer broadcasts weights. Everything here blocks.

Only gloo, and without torch's registry of groups, so that server and trainer can live in one process.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from asyncrl.servers.backend import Broadcast, GroupPlace

__all__ = ["ReceivingGroup"]

_torch: Any = distributed
# Its annotations leave out the half of it that makes groups by hand.


class ReceivingGroup:
    """The constructor returns when all ranks have come to ``place``.

    It raises ``RuntimeError``, as ``receive`` does, if another rank keeps it waiting for longer than ``timeout_s``.
    """

    def __init__(self, place: GroupPlace, *, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = _torch.TCPStore(place.address, place.port, is_master=False, timeout=timeout)
        # The prefixes under which torch's own function, which the trainer and SGLang call, lets ranks find each other.
        for prefix in (place.name, f"{place.name}/", "cpu/"):
            store = _torch.PrefixStore(prefix, store)
        self._timeout = timeout
        self._group = _torch.ProcessGroupGloo(store, place.rank, place.world_size, timeout)

    def receive(self, broadcast: Broadcast) -> dict[str, torch.Tensor]:
        """The tensors that rank 0 broadcasts."""
        names, shapes = broadcast.names, broadcast.shapes
        kinds = [getattr(torch, name) for name in broadcast.dtypes]
        counts = [math.prod(shape) for shape in shapes]
        if not broadcast.flattened:
            tensors = [torch.empty(list(shape), dtype=kind) for kind, shape in zip(kinds, shapes, strict=True)]
            for tensor in tensors:
                self._broadcast(tensor)
            return dict(zip(names, tensors, strict=True))
        sizes = [count * kind.itemsize for count, kind in zip(counts, kinds, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self._broadcast(flat)
        found: dict[str, torch.Tensor] = {}
        for name, kind, shape, part in zip(names, kinds, shapes, flat.split(sizes), strict=True):
            found[name] = part.view(kind).view(list(shape))
        return found

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, 0).wait(self._timeout)
