"""Aborts that are looked after: a server does not say whether an abort had an effect, so its load is asked.

An abort may overtake its request, or be lost. What goes on then costs the server memory and time that others wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

import anyio

from asyncrl.errors import SamplingError
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.loads import Notify
from asyncrl.sampling.pool import Pool

__all__ = ["Abortable", "Aborts"]

_SETTLE_S = 2.0
# A running request ends after its next token, and the load that a server tells may be some steps old.
_TRIES = 3
_AT_ONCE = 64
# Repeated aborts are no hurry, and connections for all of them at once would be.


class Abortable(Protocol):
    """What ends requests: a server, or a router by way of its servers."""

    async def abort(self, rid: str) -> None:
        """End one request."""
        ...


class Aborts:
    """One check for each server, however many requests were aborted there; it is there only while there are some."""

    def __init__(self, pool: Pool, spawn: Callable[[Callable[[], Coroutine[Any, Any, object]]], None], notice: Notify):
        self._pool = pool
        self._spawn = spawn
        self._notice = notice
        self._open: dict[str, dict[str, int]] = {}

    def watch(self, server: Abortable, rid: str) -> None:
        """``rid`` was aborted on ``server``: see to it that it ended. Behind a router there is nobody to ask."""
        if not isinstance(server, ServerControl):
            return
        if server.url not in self._open:
            self._open[server.url] = {}
            self._spawn(partial(self._check, server))
        self._open[server.url][rid] = 0

    def send(self, server: Abortable, rid: str) -> None:
        """Abort ``rid`` on ``server`` in the background, and see to it that it ended."""
        self._spawn(partial(server.abort, rid))
        self.watch(server, rid)

    async def _check(self, server: ServerControl) -> None:
        tries = self._open[server.url]
        while tries:
            await anyio.sleep(_SETTLE_S)
            looked_at = list(tries)
            try:
                load = await server.load()
            except SamplingError:
                # It is gone, or does not tell; the client or its load monitor has noticed.
                break
            surplus = load.running + load.waiting - self._pool.in_flight(server.url)
            if surplus <= 0:
                for rid in looked_at:
                    tries.pop(rid, None)
                continue
            await self._repeat(server, [rid for rid in looked_at if tries[rid] < _TRIES])
            given_up = [rid for rid in looked_at if tries[rid] >= _TRIES]
            for rid in looked_at:
                tries[rid] += 1
            for rid in given_up:
                del tries[rid]
            if given_up:
                self._notice("requests_not_aborted", url=server.url, count=min(surplus, len(given_up)))
        del self._open[server.url]

    async def _repeat(self, server: ServerControl, rids: list[str]) -> None:
        limiter = anyio.CapacityLimiter(_AT_ONCE)

        async def abort(rid: str) -> None:
            async with limiter:
                await server.abort(rid)

        async with anyio.create_task_group() as tasks:
            for rid in rids:
                tasks.start_soon(abort, rid)
