"""Weight updates that come in pieces through a process group: the session around them, and the groups.

A session is what SGLang wants around such updates; a disk update needs none. Tensors that come in the body of a request
are refused: reading them would mean unpickling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread

from asyncrl.sampling.embedded.group import ReceivingGroup
from asyncrl.sampling.embedded.service import Service
from asyncrl.sampling.wireserver import field, update_error

__all__ = ["WeightUpdates"]

_WITHIN_S = 120.0
# For the other ranks to join, and for a broadcast to arrive.


class WeightUpdates:
    """Owns the session and the groups of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open = False
        self._groups: dict[str, ReceivingGroup] = {}
        # A thread for each group that is waited for, and one more so that a dead trainer does not block the next one.
        self._limiter = anyio.CapacityLimiter(4)

    async def begin(self) -> None:
        """Open the session, once nothing runs or while paused."""
        async with self._service.exclusive():
            if self._open:
                raise update_error("a weight-update session is already open; call end_weight_update() first")
            self._open = True

    async def end(self) -> None:
        """Close the session."""
        async with self._service.exclusive():
            if not self._open:
                raise update_error("no weight-update session is open; call begin_weight_update() first")
            self._open = False

    def refuse_tensors(self) -> None:
        """Raise what SGLang says outside of a session, or that we never unpickle."""
        self._require_open("update_weights_from_tensor")
        raise update_error("this server never unpickles what it is sent: update from disk or by broadcast")

    async def join(self, body: Mapping[str, Any]) -> None:
        """Join a group; returns when every rank has."""
        name = field(body, "group_name", str, "weight_update_group")
        address, port = field(body, "master_address", str, ...), field(body, "master_port", int, ...)
        rank, world_size = field(body, "rank_offset", int, ...), field(body, "world_size", int, ...)
        backend = field(body, "backend", str, "nccl")
        if backend != "gloo":
            raise update_error(f"Failed to initialize custom process group: backend {backend!r}, this server has gloo")
        if name in self._groups:
            raise update_error(f"Failed to initialize custom process group: {name} exists already")

        def connect() -> ReceivingGroup:
            return ReceivingGroup(address, port, rank=rank, world_size=world_size, name=name, timeout_s=_WITHIN_S)

        try:
            self._groups[name] = await anyio.to_thread.run_sync(connect, limiter=self._limiter, abandon_on_cancel=True)
        except (RuntimeError, ValueError) as error:
            raise update_error(f"Failed to initialize custom process group: {error}.") from error

    def leave(self, name: str) -> None:
        """Forget a group."""
        if self._groups.pop(name, None) is None:
            raise update_error("The group to be destroyed does not exist.")

    async def receive(self, body: Mapping[str, Any]) -> None:
        """Take what rank 0 broadcasts, then replace those weights."""
        self._require_open("update_weights_from_distributed")
        names, dtypes, shapes = (field(body, key, list, ...) for key in ("names", "dtypes", "shapes"))
        name = field(body, "group_name", str, "weight_update_group")
        flattened = body.get("load_format") == "flattened_bucket"
        group = self._groups.get(name)
        if group is None:
            raise update_error(
                f"Failed to receive weights: Group {name} not in {list(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        try:
            tensors = await anyio.to_thread.run_sync(
                lambda: group.receive(names, dtypes, shapes, flattened=flattened),
                limiter=self._limiter,
                abandon_on_cancel=True,
            )
        except (RuntimeError, ValueError) as error:
            raise update_error(f"Failed to receive weights: {error}") from error
        await self._service.update_weights(
            tensors,
            field(body, "weight_version", str),
            flush=field(body, "flush_cache", bool, True),
            abort_all=field(body, "abort_all_requests", bool, False),
        )

    def _require_open(self, call: str) -> None:
        if not self._open:
            raise update_error(f"{call} must run between begin_weight_update() and end_weight_update()")
