"""Requests that a server accepted and does not answer: found by one timer for all of them, and asked for elsewhere.

How long a request may take is the rule of ``deadlines``. One that is late is aborted, so that its tokens so far come
back, and taken away if even that has no effect. Its server is looked at the first time, and quarantined the next.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import NoReturn

import anyio

from asyncrl.errors import SamplingError, ServerUnavailable
from asyncrl.sampling.aborts import end
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.deadlines import LEAST_S, Evidence, allowed_s, evidence
from asyncrl.sampling.places import Place
from asyncrl.sampling.pool import Pool, Running

__all__ = ["Overdue"]

_LOOK_S = 15.0
# Between two looks, however many requests are late: one look at thousands of them takes some milliseconds.
_LOAD_S = 5.0
_QUARANTINED_AT = 2


class Overdue:
    """Watches our requests in ``pool``, which are on the servers of ``fleet`` or at a router, which is left alone."""

    def __init__(self, pool: Pool, fleet: ServerFleet) -> None:
        self._pool = pool
        self._fleet = fleet
        self._times: Counter[str] = Counter()
        # How often a server had requests that were late, since it was last quarantined for that.

    async def run(self) -> NoReturn:
        """Look whenever a request may be late, until it is cancelled."""
        while True:
            await self._pool.traffic.wait_until(lambda: bool(self._pool.busy))
            await anyio.sleep(self._until_next())
            async with anyio.create_task_group() as tasks:
                for url in self._pool.busy:
                    tasks.start_soon(self.look, url)

    async def look(self, url: str) -> None:
        """End what is late on one server."""
        late = self._late(url, None)
        if not late:
            return
        found = await _evidence(late[0].place, self._pool.in_flight(url))
        late = self._late(url, found)
        if not late:
            return
        place, pace = late[0].place, self._pool.pace(url)
        for running in late:
            running.late_s = running.age_s
        reason = (
            f"{len(late)} of {self._pool.in_flight(url)} requests got no answer, the oldest for "
            f"{late[0].age_s:.0f} s; allowed were {allowed_s(late[0].work, pace, found):.0f} s"
        )
        self._fleet.notice(
            "requests_overdue",
            url=url,
            count=len(late),
            seconds=round(late[0].age_s, 1),
            allowed_seconds=round(allowed_s(late[0].work, pace, found), 1),
            slowest_seconds=round(pace.slowest_s, 1),
            seconds_per_token=pace.seconds_per_token or found.seconds_per_token,
            counted_by_server=found.counted,
        )
        self._times[url] += 1
        if self._times[url] < _QUARANTINED_AT:
            self._fleet.suspect(url, reason)
        else:
            del self._times[url]
            self._fleet.quarantine(url, reason)
        rids = {running.rid for running in late}
        self._fleet.spawn(partial(end, self._pool, url, lambda running: running.rid in rids, place))

    def _late(self, url: str, found: Evidence | None) -> list[Running]:
        """Requests that had more time than they may, oldest first; those that are being ended are left out."""
        pace = self._pool.pace(url)
        late: list[Running] = []
        for running in self._pool.running(url):
            age_s = running.age_s
            if age_s < LEAST_S:
                break  # they are in the order in which they began
            if running.late_s is None and age_s >= allowed_s(running.work, pace, found):
                late.append(running)
        return late

    def _until_next(self) -> float:
        oldest_s = max((self._pool.running(url)[0].age_s for url in self._pool.busy), default=0.0)
        return max(_LOOK_S, LEAST_S - oldest_s)


async def _evidence(place: Place, ours: int) -> Evidence:
    """What ``place`` says about its load. One that does not even answer that speaks for nothing."""
    try:
        with anyio.fail_after(_LOAD_S):
            return evidence(await place.load(), ours)
    except (ServerUnavailable, TimeoutError):
        return Evidence(counted=False)
    except SamplingError:
        return evidence(None, ours)
