"""Where a sampling request goes: to a server, or to a router in front of servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol
from urllib.parse import quote

import anyio

from asyncrl.errors import SamplingError, ServerUnavailable
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.deadlines import HoldClock
from asyncrl.sampling.replies import Load
from asyncrl.sampling.transport import Answer

__all__ = ["Place", "Router"]


class Place(Protocol):
    """Takes sampling requests. Real: ``ServerControl``, ``Router``."""

    url: str
    clock: HoldClock
    """The time that it has for requests."""

    async def generate(self, body: Mapping[str, object], *, routing_key: str) -> Answer:
        """The raw answer."""
        ...

    async def abort(self, rid: str) -> bool:
        """End one request, wherever it runs; False if nobody took that, and never an error for the servers' faults."""
        ...

    async def load(self) -> Load:
        """What it has to do. Raises ``SamplingError``."""
        ...


class Router:
    """A router, reached by ``front``. It knows no aborts, and nobody knows which of ``servers()`` has a request.

    ``clock``: stands still while any of them is held.
    """

    def __init__(self, front: ServerControl, servers: Callable[[], Iterable[ServerControl]], clock: HoldClock) -> None:
        self.url = front.url
        self.clock = clock
        self._front = front
        self._servers = servers

    async def generate(self, body: Mapping[str, object], *, routing_key: str) -> Answer:
        """Have the router send the request to the server that it chooses by ``routing_key``."""
        return await self._front.generate(body, routing_key=quote(routing_key))

    async def abort(self, rid: str) -> bool:
        """Abort ``rid`` on every server."""
        taken: list[bool] = []

        async def abort(server: ServerControl) -> None:
            taken.append(await server.abort(rid))

        async with anyio.create_task_group() as tasks:
            for server in list(self._servers()):
                tasks.start_soon(abort, server)
        return any(taken)

    async def load(self) -> Load:
        """What all servers together have to do, without those that do not tell."""
        found: list[Load] = []
        failures: list[SamplingError] = []

        async def look(server: ServerControl) -> None:
            try:
                found.append(await server.load())
            except SamplingError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for server in list(self._servers()):
                tasks.start_soon(look, server)
        if not found:
            raise failures[0] if failures else ServerUnavailable(f"there is no server behind {self.url}")
        paces = [load.tokens_per_second for load in found if load.tokens_per_second is not None]
        return Load(
            running=sum(load.running for load in found),
            waiting=sum(load.waiting for load in found),
            tokens_per_second=sum(paces) if paces else None,
        )
