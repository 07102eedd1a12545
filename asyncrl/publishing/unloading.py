"""What servers still have to give up: adapters that nobody will ask for again, and what was staged of them.

An unload may fail, its answer may be lost, and it may wait for a request that hangs: it is tried again until the server
says that the adapter is not loaded. Only when every server has let go of an adapter is its folder removed, because a
server reads that again for a late request. A server that is out of use has to give up nothing: what it still has shows
when it returns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import anyio

from asyncrl.errors import RequestRefused, SamplingError
from asyncrl.publishing.staging import StagedVersion
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.recovery import BackOff

__all__ = ["Unloading"]

_UNLOAD_S = 60.0
# The server waits for requests that use the adapter. Nobody holds it any more, so they were aborted already.


@dataclass(slots=True, kw_only=True, eq=False)
class _Retired:
    """An adapter that is to go; ``staged`` is None for one that this process has not staged."""

    name: str
    staged: StagedVersion | None
    urls: set[str] = field(default_factory=set)
    """Of servers that may still have it."""


class Unloading:
    """Owns the adapters that are on their way out. ``remove`` forgets what was staged of one."""

    def __init__(self, fleet: ServerFleet, remove: Callable[[StagedVersion], Awaitable[None]]) -> None:
        self._fleet = fleet
        self._remove = remove
        self._retired: dict[str, _Retired] = {}
        self._at_work: set[str] = set()
        # Servers that are being asked; one call at a time, for that is how they do it.
        self._back_off = BackOff(seed=0)

    def retire(self, name: str, staged: StagedVersion) -> None:
        """Have all servers in use unload ``name``, then remove ``staged``."""
        retired = self._retired[name] = _Retired(name=name, staged=staged)
        retired.urls.update(server.url for server in self._fleet.live)
        for server in self._fleet.live:
            self._start(server)
        if not retired.urls:
            self._fleet.spawn(partial(self._settle, retired))

    def sweep(self, server: ServerControl, names: Iterable[str]) -> None:
        """Have ``server`` unload what it has and should not."""
        for name in sorted(names):
            self._retired.setdefault(name, _Retired(name=name, staged=None)).urls.add(server.url)
        self._start(server)

    def _start(self, server: ServerControl) -> None:
        if server.url not in self._at_work:
            self._at_work.add(server.url)
            self._fleet.spawn(partial(self._work, server))

    def _due(self, url: str) -> list[_Retired]:
        return [retired for retired in self._retired.values() if url in retired.urls]

    async def _work(self, server: ServerControl) -> None:
        """Unload one after the other, until ``server`` has nothing left or is out of use."""
        failures = 0
        while due := self._due(server.url):
            retired = due[failures % len(due)]
            if not self._takes_requests(server) or await self._unload(server, retired.name):
                failures = 0
                await self._let_go(retired, server.url)
                continue
            failures += 1
            if failures >= len(due):
                await anyio.sleep(self._back_off.seconds(failures - len(due) + 1))
        self._at_work.discard(server.url)

    def _takes_requests(self, server: ServerControl) -> bool:
        return any(server.url == live.url for live in self._fleet.live)

    async def _let_go(self, retired: _Retired, url: str) -> None:
        retired.urls.discard(url)
        if not retired.urls:
            await self._settle(retired)

    async def _settle(self, retired: _Retired) -> None:
        del self._retired[retired.name]
        if retired.staged is None:
            return
        try:
            await self._remove(retired.staged)
        except OSError as error:
            version = retired.staged.version
            self._fleet.notice("version_not_removed", version=version, reason=repr(error))

    async def _unload(self, server: ServerControl, name: str) -> bool:
        """True if ``server`` has let go of the adapter."""
        try:
            with anyio.fail_after(_UNLOAD_S):
                try:
                    await server.unload_adapter(name)
                except RequestRefused:
                    # It may be gone already: the answer to an earlier call was lost, or the server was started anew.
                    if name in await server.adapters():
                        raise
        except (SamplingError, TimeoutError) as error:
            self._fleet.notice("adapter_not_unloaded", url=server.url, adapter=name, reason=repr(error))
            return False
        return True
