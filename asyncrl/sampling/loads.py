"""How many requests each server should have, by what it says about its queue and its KV memory.

``adapt`` is the rule, ``LoadMonitor`` asks the servers. Requests beyond what a server can run only grow old in its
queue, so they are better kept back until they can run: the sum of the limits is what the client reports as capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import anyio

from asyncrl.errors import SamplingError
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.pool import UNLIMITED, Pool
from asyncrl.sampling.replies import Load

__all__ = ["LoadMonitor", "adapt", "has_room"]

_LOOK_S = 2.0
# Queues change within seconds; an answer costs the server next to nothing. Asked only while it has requests of ours.
_LATE_S = 5.0
_LEAST = 4
_QUEUED_SHARE = 4
_FEWEST_QUEUED = 8
# A queue of a quarter of what runs keeps the server full while answers and new requests travel.
_FULL = 0.95
_ROOMY = 0.85
_GROWTH = 16


def has_room(load: Load) -> bool:
    """What waits will run as soon as it was prefilled, or when a pause is over: the queue is no overload."""
    if load.running == 0:
        return True
    roomy = load.kv_usage is None or load.kv_usage < _ROOMY
    return roomy and load.most_running is not None and load.running * 10 < load.most_running * 9


def adapt(limit: int, ours: int, load: Load | None) -> int:
    """The next limit of a server that has ``ours`` of our requests; ``load`` is None if it did not tell in time.

    Less if it queues, if its KV memory is nearly full or if it is late, and never below 4; 16 more if it is at its
    limit and nothing waits. Of 100 requests 64 run and 36 wait, and a quarter of 64 may: 100 - (36 - 16) = 80. Some
    looks later 80 run and none waits: 96::

        adapt(1_000_000, 100, Load(running=64, waiting=36))  # 80
        adapt(80, 80, Load(running=80, waiting=0))  # 96
    """
    if load is None:
        wanted = ours * 3 // 4
    elif load.kv_usage is not None and load.kv_usage >= _FULL:
        wanted = min(ours * 7 // 8, ours - load.waiting // 2)
    else:
        excess = load.waiting - max(_FEWEST_QUEUED, load.running // _QUEUED_SHARE)
        if excess <= 0 or has_room(load):
            roomy = load.kv_usage is None or load.kv_usage < _ROOMY
            grows = load.waiting == 0 and roomy and ours * 10 >= limit * 9
            return min(limit + _GROWTH, UNLIMITED) if grows else limit
        wanted = ours - excess
    # Those that wait may be of others, so one look at most halves what is ours.
    return min(limit, max(_LEAST, wanted, ours // 2))


class LoadMonitor:
    """Adapts the limits of the servers of ``pool``. ``control(url)`` reaches one, if it was not removed meanwhile.

    ``notice``: see ``ServerFleet``.
    """

    def __init__(self, pool: Pool, control: Callable[[str], ServerControl | None], notice: Callable[..., None]) -> None:
        self._pool = pool
        self._control = control
        self._notice = notice
        self._silent: set[str] = set()

    async def run(self) -> NoReturn:
        """Look every two seconds, as long as there are requests, until it is cancelled."""
        while True:
            await self._pool.traffic.wait_until(lambda: bool(self._busy()))
            await anyio.sleep(_LOOK_S)
            async with anyio.create_task_group() as tasks:
                for url in self._busy():
                    tasks.start_soon(self.look, url)

    async def look(self, url: str) -> None:
        """Ask one server and adapt its limit. One that cannot tell keeps its limit, and that is noticed once."""
        server, load = self._control(url), None
        if server is None:
            return
        with anyio.move_on_after(_LATE_S):
            try:
                load = await server.load()
            except SamplingError as error:
                if url not in self._silent:
                    self._silent.add(url)
                    self._notice("server_load_unknown", url=url, reason=str(error))
                return
        if url not in self._pool:
            return
        limit = adapt(self._pool.limit(url), self._pool.in_flight(url), load)
        if limit != self._pool.limit(url):
            self._pool.set_limit(url, limit)

    def _busy(self) -> list[str]:
        return [url for url in self._pool.live if self._pool.in_flight(url)]
