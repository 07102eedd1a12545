"""Servers that leave use and come back: suspicion, quarantine, and the way to the current policy.

Whoever finds something odd about a server says so here. How a server is brought to the current policy is told by the
publisher; it happens in the background, however often it takes, and only then does the server take requests.
"""

from __future__ import annotations

import random
from functools import partial

import anyio

from asyncrl.errors import ConfigError, PublicationError, SamplingError
from asyncrl.sampling.backend import Restore, ServerFleet
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.pool import Pool, ServerState

__all__ = ["BackOff", "Restorer", "described", "require_nothing"]

_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 30.0
_DOUBLINGS = 10
# More than the longest needs; a server that is away for a day must not overflow the power.


class BackOff:
    """How long to wait after failures: doubles with each, from half a second to half a minute."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def seconds(self, failures: int) -> float:
        """The jitter keeps clients that failed together from coming back together."""
        longest_s = min(_FIRST_BACK_OFF_S * 2.0 ** min(failures - 1, _DOUBLINGS), _LONGEST_BACK_OFF_S)
        return longest_s * self._random.uniform(0.5, 1.0)


class Restorer:
    """Owns which servers of ``fleet`` are on their way back, which takes a ``restore(server)`` that succeeds."""

    def __init__(self, pool: Pool, fleet: ServerFleet, restore: Restore, back_off: BackOff) -> None:
        self._pool = pool
        self._fleet = fleet
        self._restore = restore
        self._back_off = back_off
        self._returning: dict[str, anyio.CancelScope] = {}

    def suspect(self, server: ServerControl, reason: str) -> None:
        """Give ``server`` no new request before it was looked at; what runs there goes on."""
        if self._pool.state(server.url) is ServerState.LIVE:
            self._pool.set_state(server.url, ServerState.SUSPECT)
            self.bring_back(server, reason)

    def quarantine(self, server: ServerControl, reason: str) -> None:
        """Take ``server`` out of use until it could be restored; its requests move to other servers."""
        state = self._pool.state(server.url)
        if state is ServerState.LEAVING:
            return
        if state is not ServerState.OUT:
            self._pool.set_state(server.url, ServerState.OUT)
            self._fleet.notice("server_quarantined", url=server.url, reason=reason)
        self.bring_back(server, reason)

    def bring_back(self, server: ServerControl, reason: str, *, at_once: bool = False) -> None:
        """Restore a server that takes no requests, in the background. ``at_once``: it has just been added."""
        if server.url not in self._returning:
            scope = self._returning[server.url] = anyio.CancelScope()
            self._fleet.spawn(partial(self._return, server, reason, scope, at_once))

    def forget(self, url: str) -> None:
        """``url`` was removed: nobody waits for it any more."""
        scope = self._returning.pop(url, None)
        if scope is not None:
            scope.cancel()

    async def _return(self, server: ServerControl, reason: str, scope: anyio.CancelScope, at_once: bool) -> None:
        with scope:
            await self._restored(server, reason, at_once=at_once)
            # A scope that was cancelled while nothing could be interrupted has lost its server all the same.
            if self._returning.get(server.url) is scope:
                del self._returning[server.url]
                self._pool.set_state(server.url, ServerState.LIVE)
                self._fleet.notice("server_returned", level="info", url=server.url, reason=reason)

    async def _restored(self, server: ServerControl, reason: str, *, at_once: bool) -> None:
        """Restore a server, however often it takes. The only way to learn that a server is back is to ask it."""
        failures = 0
        while True:
            if failures or (self._pool.state(server.url) is ServerState.OUT and not at_once):
                await anyio.sleep(self._back_off.seconds(failures + 1))
            try:
                with anyio.fail_after(self._fleet.timeouts.publication_s):
                    await self._restore(server)
            except (SamplingError, PublicationError, ConfigError, TimeoutError) as error:
                failures += 1
                if failures == 1 and at_once:
                    self._fleet.notice("server_not_ready", url=server.url, reason=described(error))
                if failures > 1:
                    self.quarantine(server, f"{reason}; then {described(error)}")
            else:
                return


async def require_nothing(server: ServerControl) -> None:
    """Restore nothing, as long as nothing was published: a server that answers may take requests."""


def described(error: BaseException) -> str:
    """An error as part of a sentence: its class, for many have no text, and its text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
