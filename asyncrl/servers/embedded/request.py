"""One generation request inside the embedded server, from its arrival to its last token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import anyio

from asyncrl.servers.embedded.cache import Node
from asyncrl.servers.embedded.model import Adapter
from asyncrl.servers.generation import Generation

__all__ = ["Request"]


@dataclass(slots=True, kw_only=True, eq=False)
class Request(Generation[Adapter]):
    """Changed by the engine's step only; ``finish_reason`` is set last."""

    slots: array[int] = field(default_factory=lambda: array("q"))
    """Pool slot of each token whose KV is computed: all but the last one while decoding."""
    node: Node | None = None
    """Where the cached part of ``slots`` ends in the trie; locked."""
    cached: int = 0
    """Leading slots that the trie owns."""
    prefilled: bool = False
    """A first prefill has been done."""
    done: anyio.Event = field(default_factory=anyio.Event)
    failure: str = ""
    """Why it could not be computed."""
