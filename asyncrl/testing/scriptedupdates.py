"""Weight updates of a scripted server that come in pieces: nobody connects, and theta is in the names of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.servers.wireroutes import UpdateSession, update_options
from asyncrl.servers.wireserver import field
from asyncrl.testing.scriptedengine import ScriptedEngine
from asyncrl.testing.theta import decoded, find_theta

__all__ = ["ScriptedUpdates"]


class ScriptedUpdates(UpdateSession):
    """Owns the session and the names of the groups."""

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine.exclusive)
        self._engine = engine

    def forget(self) -> None:
        """Be a new process."""
        self._open = False
        self._groups.clear()

    async def join(self, body: Mapping[str, Any]) -> None:
        """Remember the name of the group."""
        field(body, "master_address", str, ...)
        for key in ("master_port", "rank_offset", "world_size"):
            field(body, key, int, ...)
        self._groups[_name(body)] = None

    async def receive(self, body: Mapping[str, Any]) -> None:
        """Take theta from the names that are broadcast."""
        names = [str(name).encode() for name in field(body, "names", list, ...)]
        field(body, "dtypes", list, ...), field(body, "shapes", list, ...)
        if self._open:
            self._require_group(_name(body))
        await self._update("update_weights_from_distributed", names, **update_options(body))

    async def receive_tensors(self, payloads: Sequence[object], body: Mapping[str, Any]) -> None:
        """Take theta from the names in ``payloads``."""
        await self._update("update_weights_from_tensor", decoded(payloads), **update_options(body))

    async def _update(
        self, call: str, content: Sequence[bytes], *, label: str | None, flush: bool, abort_all: bool
    ) -> None:
        """Without a theta in ``content`` only the label changes."""
        if abort_all:
            await self._engine.abort_all()
        async with self._engine.exclusive():
            self._require_open(call)
            theta = find_theta(content)
            self._engine.replace(self._engine.theta if theta is None else theta, label, flush=flush)


def _name(body: Mapping[str, Any]) -> str:
    name: str = field(body, "group_name", str, "weight_update_group")
    return name
