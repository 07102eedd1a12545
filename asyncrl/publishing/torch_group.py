"""A process group of ours as rank 0 and the ranks of some servers, to broadcast weights through.

Everything here blocks: it runs in threads of its own, never on the event loop and not in the learner's. A server that
died must not hold it for ever, so that each operation ends, with an error, after ``timeout_s``.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

__all__ = ["TorchGroup"]


class TorchGroup:
    """The side of rank 0. ``listener``: a bound socket where the others meet us; it is taken over.

    ``join`` returns when all ranks have come, which each server does only after it was told to.
    """

    def __init__(self, listener: socket.socket, *, name: str, backend: str, world_size: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = backend
        self._name = name
        self._world_size = world_size
        self._group: Any = None
        address, port = listener.getsockname()[:2]
        stores: Any = distributed  # whose stores its annotations leave out
        # A socket that is bound already, because the store would listen on every interface.
        self._store = stores.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        self._store = stores.PrefixStore(name, self._store)

    def join(self) -> None:
        """Wait until every rank has joined."""
        # As the servers do it. torch's public functions make groups only within a default group, and that belongs to
        # the learner, which the servers are no part of.
        self._group, _ = distributed_c10d._new_process_group_helper(
            self._world_size,
            0,
            [],
            distributed.Backend(self._backend),
            self._store,
            group_name=distributed_c10d.GroupName(self._name),
            timeout=self._timeout,
        )
        # What that function leaves to its caller; torch takes a group apart only if it is written down here.
        distributed_c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._world_size)}

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send ``flat`` to all servers; each must have been told to receive it."""
        work = self._group.broadcast(flat, 0)
        work.wait(self._timeout)
        if flat.is_cuda:
            # There waiting only orders GPU work; the tensor may be freed once we return.
            torch.cuda.current_stream(flat.device).synchronize()

    def close(self) -> None:
        """Leave the group. Servers that still wait in it get an error."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()
            distributed.destroy_process_group(group)
