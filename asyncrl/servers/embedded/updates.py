"""Weight updates that come in pieces through a process group: the session around them, and the groups.

A session is what SGLang wants around such updates; a disk update needs none. Tensors that come in the body of a request
are refused: reading them would mean unpickling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread

from asyncrl.sampling.replies import shown
from asyncrl.servers.embedded.group import ReceivingGroup
from asyncrl.servers.embedded.service import Service
from asyncrl.servers.wireroutes import UpdateSession, update_options
from asyncrl.servers.wireserver import bad_request, field, update_error

__all__ = ["WeightUpdates"]

_DTYPES = ("float32", "bfloat16", "float16")
_MOST_RANKS = 2**16
_PLAIN = re.compile(r"[!-~]{1,255}")
_WITHIN_S = 120.0
# For the other ranks to join, and for a broadcast to arrive.


class WeightUpdates(UpdateSession):
    """Owns the session and the groups of one server."""

    def __init__(self, service: Service) -> None:
        super().__init__(service.exclusive)
        self._service = service
        # A thread for each group that is waited for, and one more so that a dead trainer does not block the next one.
        self._limiter = anyio.CapacityLimiter(4)

    async def receive_tensors(self, payloads: Sequence[object], body: Mapping[str, Any]) -> None:
        """Raise what SGLang says outside of a session, or that we never unpickle."""
        self._require_open("update_weights_from_tensor")
        raise update_error("this server never unpickles what it is sent: update from disk or by broadcast")

    async def join(self, body: Mapping[str, Any]) -> None:
        """Join a group; returns when every rank has."""
        name = _name(body)
        address, port = field(body, "master_address", str, ...), _within(body, "master_port", 1, 65_535)
        world_size = _within(body, "world_size", 2, _MOST_RANKS)
        rank = _within(body, "rank_offset", 1, world_size - 1)
        if not _PLAIN.fullmatch(address):
            raise bad_request(f"master_address is {shown(address)}, but must be the name or address of a host")
        backend = field(body, "backend", str, "nccl")
        if backend != "gloo":
            raise update_error(
                f"Failed to initialize custom process group: backend {shown(backend)}, this server has gloo"
            )
        if name in self._groups:
            raise update_error(f"Failed to initialize custom process group: {name} exists already")

        def connect() -> ReceivingGroup:
            return ReceivingGroup(address, port, rank=rank, world_size=world_size, name=name, timeout_s=_WITHIN_S)

        try:
            self._groups[name] = await anyio.to_thread.run_sync(connect, limiter=self._limiter, abandon_on_cancel=True)
        except (RuntimeError, ValueError) as error:
            raise update_error(f"Failed to initialize custom process group: {error}.") from error

    async def receive(self, body: Mapping[str, Any]) -> None:
        """Take what rank 0 broadcasts, then replace those weights."""
        self._require_open("update_weights_from_distributed")
        names, dtypes, shapes = (field(body, key, list, ...) for key in ("names", "dtypes", "shapes"))
        name = _name(body)
        options = update_options(body)
        flattened = body.get("load_format") == "flattened_bucket"
        group: ReceivingGroup = self._require_group(name)
        # Before anybody waits for a broadcast that could not be used.
        self._require_ours(names, dtypes, shapes)
        try:
            tensors = await anyio.to_thread.run_sync(
                lambda: group.receive(names, dtypes, shapes, flattened=flattened),
                limiter=self._limiter,
                abandon_on_cancel=True,
            )
        except (RuntimeError, ValueError) as error:
            raise update_error(f"Failed to receive weights: {error}") from error
        await self._service.update_weights(tensors, **options)

    def _require_ours(self, names: list[Any], dtypes: list[Any], shapes: list[Any]) -> None:
        if not len(names) == len(dtypes) == len(shapes):
            raise bad_request(
                f"names, dtypes and shapes must be of one length, but have {len(names)}, {len(dtypes)}, {len(shapes)}"
            )
        known = self._service.engine.model.shapes()
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if type(name) is not str or known.get(name) != shape:
                raise update_error(
                    f"Failed to receive weights: names and shapes have {shown(name)} of {shown(shape)}, which is no "
                    "weight of the model that is served"
                )
            if dtype not in _DTYPES:
                raise update_error(
                    f"Failed to receive weights: dtypes has {shown(dtype)}, but must have {', '.join(_DTYPES)}"
                )


def _within(body: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value: int = field(body, key, int, ...)
    if not least <= value <= most:
        raise bad_request(f"{key} is {shown(value)}, but must be from {least} to {most}")
    return value


def _name(body: Mapping[str, Any]) -> str:
    name: str = field(body, "group_name", str, "weight_update_group")
    if not _PLAIN.fullmatch(name):
        raise bad_request(f"group_name is {shown(name)}, but must be up to 255 visible characters")
    return name
