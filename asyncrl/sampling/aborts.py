"""Aborts that are looked after: a server does not say whether an abort had an effect, so its load is asked.

An abort may overtake its request, or be lost. What goes on then costs the server memory and time that others wait for.
Requests that have to end are aborted until they were answered, and taken away if they never are (``end``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio

from asyncrl.errors import SamplingError
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.held import Told
from asyncrl.sampling.places import Place
from asyncrl.sampling.pool import Pool, Running

__all__ = ["Aborts", "end"]

_SETTLE_S = 2.0
# A running request ends after its next token, and the load that a server tells may be some steps old.
_TRIES = 3
_AT_ONCE = 64
# Repeated aborts are no hurry, and connections for all of them at once would be.
_ANSWER_S = 30.0
_REPEAT_S = 2.0


class Aborts:
    """One check for each server, however many requests were aborted there; it is there only while there are some."""

    def __init__(self, pool: Pool, fleet: ServerFleet) -> None:
        self._pool = pool
        self._fleet = fleet
        self._open: dict[str, dict[str, int]] = {}

    def watch(self, place: Place, rid: str) -> None:
        """``rid`` was aborted on ``place``: see to it that it ended. Behind a router there is nobody to ask."""
        if not isinstance(place, ServerControl):
            return
        if place.url not in self._open:
            self._open[place.url] = {}
            self._fleet.spawn(partial(self._check, place))
        self._open[place.url][rid] = 0

    async def abort(self, place: Place, rid: str) -> bool:
        """Abort ``rid`` on ``place``, and see to it that it ends. False if nobody took that now."""
        self.watch(place, rid)
        return await place.abort(rid)

    def begin(self, place: Place, rid: str, told: Told) -> None:
        """The same in the background, also while the client is being closed."""
        self._fleet.spawn(partial(self._tell, place, rid, told))

    async def _tell(self, place: Place, rid: str, told: Told) -> None:
        with anyio.CancelScope(shield=True):
            told(await self.abort(place, rid))

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
                self._fleet.notice("requests_not_aborted", url=server.url, count=min(surplus, len(given_up)))
        del self._open[server.url]

    async def _repeat(self, server: ServerControl, rids: list[str]) -> None:
        limiter = anyio.CapacityLimiter(_AT_ONCE)

        async def abort(rid: str) -> None:
            async with limiter:
                await server.abort(rid)

        async with anyio.create_task_group() as tasks:
            for rid in rids:
                tasks.start_soon(abort, rid)


async def end(pool: Pool, url: str, chosen: Callable[[Running], bool], place: Place, *, waits: bool = True) -> None:
    """Abort those of our requests on ``url`` that are ``chosen``, and wait until they were answered.

    One that is not answered within half a minute is taken away: it goes on elsewhere. Not ``waits``: each is aborted
    once, and that is all.
    """

    def left() -> list[Running]:
        return [running for running in pool.running(url) if chosen(running)]

    with anyio.move_on_after(_ANSWER_S):
        while unanswered := left():
            # Again and again, for an abort has no effect if it overtakes its request.
            async with anyio.create_task_group() as tasks:
                for running in unanswered:
                    tasks.start_soon(place.abort, running.rid)
            if not waits:
                return
            with anyio.move_on_after(_REPEAT_S):
                await pool.traffic.wait_until(lambda: not left())
    for running in left():
        running.held.interrupt()
