"""What is behind the routes of one of our own servers: the protocol of what computes, and what a broadcast says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.sampling.wire import PauseMode
from asyncrl.servers.adapters import Adapters
from asyncrl.servers.wireserver import ServerLimits

__all__ = ["Backend", "Broadcast", "GroupPlace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A process group, where its ranks meet, and which of them a server is."""

    name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Weights that rank 0 sends: one after the other, or ``flattened`` into one tensor of bytes."""

    names: Sequence[Any]
    dtypes: Sequence[Any]
    shapes: Sequence[Any]
    flattened: bool


class Backend(Protocol):
    """What computes. Its coroutines raise ``WireError`` for what they refuse. Weights and groups are its own values."""

    adapters: Adapters[Any]
    limits: ServerLimits
    paused: PauseMode | None

    @property
    def load(self) -> tuple[int, int]:
        """Running and waiting requests."""

    @property
    def used_tokens(self) -> int:
        """Of the KV pool."""

    @property
    def tokens_per_second(self) -> float:
        """Of all running requests; zero if none runs."""

    async def abort(self, rid: str) -> None:
        """End one request with what it has; an unknown one is nothing."""

    async def abort_all(self) -> None:
        """End every request with what it has."""

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests, and end, send back or freeze those that run."""

    def resume(self) -> None:
        """Go on."""

    async def flush(self) -> bool:
        """Forget cached prefixes; False, and nothing happens, while requests run or, not paused, wait."""

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        """At once if paused; else after the requests that run, and new ones wait."""

    async def update(self, weights: Any, label: str | None) -> None:
        """Use the weights of a folder or of ``receive`` or ``unpacked``, under another label; None keeps what is.

        Raises ``OSError`` or ``ValueError`` if they are no weights of this model.
        """

    def unpacked(self, payloads: Sequence[bytes]) -> Any:
        """Weights that came in a body."""

    async def join(self, place: GroupPlace) -> Any:
        """A group, once every rank has joined it."""

    async def receive(self, group: Any, broadcast: Broadcast) -> Any:
        """Weights that come through a group."""

    async def checksums(self) -> Mapping[str, str]:
        """A digest of each weight."""
