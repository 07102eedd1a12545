"""FullPublisher: all weights, replaced on running servers.

One server holds one version. Requests that run during the update go on under the new weights, and the server says
which of their tokens are of which version; a trajectory cannot keep its version. How the weights travel is the
carrier's part; the rule is here: which requests must end before, pause, replace, flush, verify, go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import anyio

from asyncrl.errors import ConfigError, SamplingError
from asyncrl.learning.base import Learner
from asyncrl.publishing.carriers import Carrier
from asyncrl.publishing.delivery import Delivery, JointUpdate
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.staging import ServerPublisher, StagedVersion
from asyncrl.sampling.backend import ServerFleet
from asyncrl.sampling.base import ModelRef
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.labels import Writer
from asyncrl.sampling.wire import PauseMode
from asyncrl.scheduling.rules import KVCache

__all__ = ["FullPublisher", "Prefixes", "check_pause_mode", "replace_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """What an update does about context that older weights computed."""

    flush: bool
    """Forget all of it: whatever runs computes its context again."""
    oldest_anchor: int | None
    """Requests on a prefix of an older version must end before the update; None: none must."""

    @classmethod
    def at_update(cls, version: int, kv_cache: KVCache | None) -> Prefixes:
        """The rule at the update to ``version``: no prefix may become older than ``kv_cache.max_staleness``.

        New requests need no protection, because each version has a cache namespace of its own. It is the requests under
        way that carry a prefix over the update. Worked example, ``max_staleness=1``, update to 7: a request on the
        prefix of 6 goes on, one on the prefix of 5 must end first, for under 7 that prefix would have age 2.
        """
        if kv_cache is None or kv_cache.max_staleness == 0:
            return cls(flush=True, oldest_anchor=None)
        return cls(flush=False, oldest_anchor=version - kv_cache.max_staleness)


def check_pause_mode(pause_mode: PauseMode, kv_cache: KVCache | None) -> None:
    """Refuse a pause that keeps running requests on context that the rule wants computed again."""
    if pause_mode == "in_place" and kv_cache is not None and kv_cache.max_staleness == 0:
        raise ConfigError(
            "pause_mode is 'in_place', which lets requests go on with context of older weights, and "
            "kv_cache.max_staleness is 0, which allows none: use pause_mode='retract' or 'abort', or a "
            "kv_cache.max_staleness of at least 1"
        )


class FullPublisher(ServerPublisher):
    """Publishes all weights to the servers of ``fleet``.

    ``carrier``: how they travel.
    ``pause_mode``: what becomes of running requests. ``retract`` computes their context again under the new weights, as
    far as the prefix cache does not have it, ``in_place`` lets them go on with the context of the old ones, ``abort``
    ends them with what they have.
    ``kv_cache``: how old a prefix may be that requests reuse; None if no request should cross an update.
    ``probe``: None makes one for the learner's model. ``writer``: whose weights they are; None is a run of its own.
    """

    pins_versions = False

    def __init__(
        self,
        learner: Learner,
        fleet: ServerFleet,
        carrier: Carrier,
        *,
        pause_mode: PauseMode = "retract",
        kv_cache: KVCache | None = None,
        probe: Probe | None = None,
        writer: Writer | None = None,
    ) -> None:
        check_pause_mode(pause_mode, kv_cache)
        super().__init__(learner, fleet, carrier.store, probe)
        self._carrier = carrier
        self._pause_mode = pause_mode
        self._kv_cache = kv_cache
        self._delivery = Delivery(fleet, self._install)
        fleet.claim(writer or Writer(), self._delivery.restore, in_place=pause_mode == "in_place")

    async def adopt(self, versions: Iterable[int]) -> frozenset[int]:
        """Adopts no version, for a server holds one at a time; what an earlier process has left on disk is removed."""
        await self._carrier.store.adopt(())
        return frozenset()

    async def publish(self, version: int) -> float:
        """Update every server to the staged weights; see ``Publisher``."""
        difference = await self._delivery.to_all(self._staged[version])
        self.newest = version
        published = sorted(staged for staged in self._staged if staged <= version)
        for old in published[: -self._carrier.store.kept]:
            await self._staging.remove(self._staged.pop(old))
        return difference

    def model_ref(self, version: int, anchor: int | None = None) -> ModelRef:
        """The base weights, with a namespace that keeps a new request from reusing the context of older ones."""
        return ModelRef(adapter=None, extra_key=f"v{version if anchor is None else anchor}")

    async def _install(self, server: ServerControl, staged: StagedVersion, together: JointUpdate) -> float:
        prefixes = Prefixes.at_update(staged.version, self._kv_cache)
        mode = self._pause_mode
        if together.returning:
            # Its cache may have been filled under weights that were half replaced.
            mode, prefixes = "retract", Prefixes(flush=True, oldest_anchor=None)
        elif prefixes.oldest_anchor is not None:
            await self._fleet.abort_older(server.url, prefixes.oldest_anchor)
        label = self._fleet.labels.give(staged.version)
        await replace_weights(
            self._fleet,
            server,
            label,
            lambda: self._carrier.update(server, staged.version, label, together),
            pause_mode=mode,
            # Frozen requests hold on to their context, and the server refuses to forget it under them.
            flush=prefixes.flush and mode != "in_place",
        )
        return await self._staging.check(server, staged)


async def replace_weights(
    fleet: ServerFleet,
    server: ServerControl,
    label: str,
    update: Callable[[], Awaitable[None]],
    *,
    pause_mode: PauseMode,
    flush: bool,
) -> None:
    """Have ``update`` replace the base weights of one server inside a pause, and verify that it reports ``label``.

    The server goes on whatever happens, also if this is cancelled; if anything failed it is quarantined before that.
    ``flush``: forget the prefix cache in between; not possible with ``in_place``.
    """
    try:
        await server.pause(pause_mode)
        await update()
        if flush:
            await server.flush()
        fleet.labels.verify(server.url, await server.weight_label(), label)
    except BaseException as error:
        # The weights may be half replaced: no request may go on under them, so this comes before continue_.
        fleet.quarantine(server.url, f"its update to {label} failed: {error!r}")
        with anyio.CancelScope(shield=True), suppress(SamplingError):
            await server.continue_()
        raise
    with anyio.CancelScope(shield=True):
        await server.continue_()
