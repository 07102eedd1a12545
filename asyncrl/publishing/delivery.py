"""Bringing all servers to one version, and a server that was away to the same.

The publishers say how one server takes a version; here is which servers, what happens to one that fails, and that no
server takes requests without the version that is being delivered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from asyncrl.errors import ProbeMismatch, PublicationError, SamplingError, ServerUnavailable
from asyncrl.publishing.staging import Release
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.sglang import SGLang

__all__ = ["Delivery"]


class Delivery:
    """Owns what the servers must hold: the last release given to ``to_all``.

    ``install(server, release)`` makes ``release`` live on ``server``, verifies it and returns the probe's difference.
    It may be called again for a release that the server already has.
    """

    def __init__(self, sampler: SGLang, install: Callable[[ServerControl, Release], Awaitable[float]]) -> None:
        self._sampler = sampler
        self._install = install
        self._release: Release | None = None
        self._differences: dict[str, float] = {}
        self._failures: dict[str, Exception] = {}
        self._locks: dict[str, anyio.Lock] = {}
        sampler.restore_with(self._restore)

    async def to_all(self, release: Release) -> float:
        """Deliver to every server that takes requests; one that fails is quarantined until it could be restored.

        Returns the largest probe difference. Raises ``ProbeMismatch`` if any server applied something else, and
        ``PublicationError`` if no server is left and none comes back in time.
        """
        self._release = release
        self._differences.clear()
        self._failures.clear()
        async with anyio.create_task_group() as tasks:
            for server in self._sampler.live:
                tasks.start_soon(self._deliver, server, release)
        for failure in self._failures.values():
            if isinstance(failure, ProbeMismatch):
                raise failure
        try:
            # A server that returns meanwhile was restored to this release, because that was set first.
            await self._sampler.wait_live()
        except ServerUnavailable as error:
            reasons = "; ".join(str(failure) for failure in self._failures.values())
            raise PublicationError(f"no server took version {release.version}: {reasons or error}") from error
        return max(self._differences.values())

    async def _deliver(self, server: ServerControl, release: Release) -> None:
        limit_s = self._sampler.timeouts.publication_s
        try:
            with anyio.fail_after(limit_s):
                await self._install_once(server, release)
        except TimeoutError:
            late = ServerUnavailable(f"{server.url} did not take version {release.version} within {limit_s:g} s")
            self._failures[server.url] = late
        except (SamplingError, PublicationError) as error:
            self._failures[server.url] = error
        if server.url in self._failures:
            self._sampler.quarantine(server.url, str(self._failures[server.url]))

    async def _restore(self, server: ServerControl) -> None:
        """Install whatever is the release at the end of the installation."""
        installed = None
        while (release := self._release) is not None and release is not installed:
            await self._install_once(server, release)
            installed = release

    async def _install_once(self, server: ServerControl, release: Release) -> None:
        # A delivery and a return may meet on one server; pauses and loads of the two must not interleave.
        async with self._locks.setdefault(server.url, anyio.Lock()):
            difference = await self._install(server, release)
        if release is self._release:
            self._differences[server.url] = difference
