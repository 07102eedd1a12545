"""One generation request inside the embedded server, from its arrival to its last token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from asyncrl.servers.embedded.cache import Node
from asyncrl.servers.embedded.model import Adapter
from asyncrl.servers.generation import Generation

__all__ = ["Request"]


@dataclass(slots=True, kw_only=True, eq=False)
class Request(Generation[Adapter]):
    """Changed by the engine's step only; ``finish_reason`` is set last."""

    max_new_tokens: int
    """After clipping to the context."""
    stop_ids: frozenset[int]
    tokens: array[int]
    """Prompt and output."""
    slots: array[int] = field(default_factory=lambda: array("q"))
    """Pool slot of each token whose KV is computed: all but the last one while decoding."""
    node: Node | None = None
    """Where the cached part of ``slots`` ends in the trie; locked."""
    cached: int = 0
    """Leading slots that the trie owns."""
    prefilled: bool = False
    """A first prefill has been done."""
    failure: str = ""
    """Why it could not be computed."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.wire.input_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.wire.input_ids)

    def append(self, token: int, logprob: float, label: str) -> None:
        """Add a sampled token of the weights called ``label``."""
        self.note(logprob, label)
        self.tokens.append(token)
