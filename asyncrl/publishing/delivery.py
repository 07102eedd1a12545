"""Bringing all servers to one version, and a server that was away to the same.

The publishers say how one server takes a version; here is which servers, what happens to one that fails, and that no
server takes requests without the version that is being delivered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeAlias

import anyio

from asyncrl.concurrency.notifier import Notifier
from asyncrl.errors import ProbeMismatch, PublicationError, SamplingError, ServerUnavailable, WeightsOverwritten
from asyncrl.publishing.staging import StagedVersion
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.control import ServerControl

__all__ = ["Delivery", "Install", "JointUpdate"]


class JointUpdate:
    """One update of all servers. A carrier that serves many at once waits here until each has arrived or was given up.

    ``urls``: the servers that take part. ``returning``: one server that was away, by itself.
    """

    def __init__(self, urls: Iterable[str], *, returning: bool = False) -> None:
        self.returning = returning
        self._awaited = set(urls)
        self._present: list[ServerControl] = []
        self._outcome: Mapping[str, Exception] | None = None
        self._changed = Notifier()

    def leave(self, url: str) -> None:
        """``url`` has what it should have, or will not get it: nobody waits for it any longer."""
        self._awaited.discard(url)
        self._changed.notify()

    async def serve_all(
        self,
        server: ServerControl,
        serve: Callable[[list[ServerControl]], Awaitable[Mapping[str, Exception]]],
        *,
        patience_s: float,
    ) -> None:
        """Serve ``server`` with all others that come here within ``patience_s``.

        Whoever came first calls ``serve`` for all of them; it returns which failed, and why. Raises what is said about
        ``server``.
        """
        if not self._awaited:
            raise PublicationError(f"{server.url} was ready too late for the update of the others")
        self._present.append(server)
        self.leave(server.url)
        if self._present[0] is server:
            await self._lead(serve, patience_s)
        else:
            await self._changed.wait_until(lambda: self._outcome is not None)
        assert self._outcome is not None
        if server.url in self._outcome:
            raise self._outcome[server.url]

    async def _lead(
        self, serve: Callable[[list[ServerControl]], Awaitable[Mapping[str, Exception]]], patience_s: float
    ) -> None:
        outcome: Mapping[str, Exception] | None = None
        try:
            with anyio.move_on_after(patience_s):
                await self._changed.wait_until(lambda: not self._awaited)
            self._awaited.clear()
            outcome = await serve(self._present)
        finally:
            self._awaited.clear()
            if outcome is None:
                message = "the update of all servers at once was given up"
                outcome = {server.url: PublicationError(message) for server in self._present}
            self._outcome = outcome
            self._changed.notify()


Install: TypeAlias = Callable[[ServerControl, StagedVersion, JointUpdate], Awaitable[float]]
"""Makes a version live on a server, verifies it and returns the probe's difference.

It may be called again for a version that the server already has.
"""


class Delivery:
    """Owns what the servers must hold: the last version given to ``to_all``. Their fleet calls ``restore``."""

    def __init__(self, fleet: ServerFleet, install: Install) -> None:
        self._fleet = fleet
        self._install = install
        self._newest: StagedVersion | None = None
        self._differences: dict[str, float] = {}
        self._failures: dict[str, Exception] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._installed: dict[str, StagedVersion] = {}
        self._joining: dict[str, ServerControl] = {}
        # Servers on their way back that have some version, if not the newest. They take part in the next delivery:
        # with versions coming faster than one is installed, a server by itself would always be one behind.

    async def to_all(self, staged: StagedVersion) -> float:
        """Deliver to every server that takes requests; one that fails is quarantined until it could be restored.

        Returns the largest probe difference. Raises ``ProbeMismatch`` if any server applied something else, and
        ``PublicationError`` if no server is left and none comes back in time.
        """
        self._newest = staged
        self._differences.clear()
        self._failures.clear()
        servers = [*self._fleet.live, *self._joining.values()]
        together = JointUpdate(server.url for server in servers)
        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(self._deliver, server, staged, together)
        for failure in self._failures.values():
            if isinstance(failure, ProbeMismatch | WeightsOverwritten):
                raise failure
        try:
            # A server that returns meanwhile was restored to this version, because that was set first.
            await self._fleet.wait_live()
        except ServerUnavailable as error:
            reasons = "; ".join(str(failure) for failure in self._failures.values())
            raise PublicationError(f"no server took version {staged.version}: {reasons or error}") from error
        return max(self._differences.values())

    async def _deliver(self, server: ServerControl, staged: StagedVersion, together: JointUpdate) -> None:
        limit_s = self._fleet.timeouts.publication_s
        try:
            with anyio.fail_after(limit_s):
                await self._install_once(server, staged, together)
        except TimeoutError:
            late = ServerUnavailable(f"{server.url} did not take version {staged.version} within {limit_s:g} s")
            self._failures[server.url] = late
        except (SamplingError, PublicationError) as error:
            self._failures[server.url] = error
        finally:
            together.leave(server.url)
        if server.url in self._failures:
            self._fleet.quarantine(server.url, str(self._failures[server.url]))

    async def restore(self, server: ServerControl) -> None:
        """Install on a server that was away whatever is the newest version at the end of the installation."""
        self._installed.pop(server.url, None)
        try:
            while (staged := self._newest) is not None and staged is not self._installed.get(server.url):
                await self._install_once(server, staged, JointUpdate([server.url], returning=True))
                self._joining[server.url] = server
        finally:
            self._joining.pop(server.url, None)

    async def _install_once(self, server: ServerControl, staged: StagedVersion, together: JointUpdate) -> None:
        # A delivery and a return may meet on one server; pauses and loads of the two must not interleave.
        async with self._locks.setdefault(server.url, anyio.Lock()):
            if self._installed.get(server.url) is staged and server.url in self._joining:
                return
            difference = await self._install(server, staged, together)
            self._installed[server.url] = staged
        if staged is self._newest:
            self._differences[server.url] = difference
