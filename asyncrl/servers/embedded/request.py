"""One generation request inside the embedded server, from its arrival to its last token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from asyncrl.servers.adapters import LoadedAdapter
from asyncrl.servers.embedded.cache import Node
from asyncrl.servers.embedded.model import Adapter
from asyncrl.servers.wireserver import GenerateRequest

__all__ = ["Request"]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Changed by the engine's step only; ``finish_reason`` is set last."""

    wire: GenerateRequest
    adapter: LoadedAdapter[Adapter] | None
    max_new_tokens: int
    """After clipping to the context."""
    stop_ids: frozenset[int]
    tokens: array[int]
    """Prompt and output."""
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[float | None, int]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(label, first output token under it)."""
    slots: array[int] = field(default_factory=lambda: array("q"))
    """Pool slot of each token whose KV is computed: all but the last one while decoding."""
    node: Node | None = None
    """Where the cached part of ``slots`` ends in the trie; locked."""
    cached: int = 0
    """Leading slots that the trie owns."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache at the first prefill."""
    retractions: int = 0
    prefilled: bool = False
    """A first prefill has been done."""
    failure: str = ""
    """Why it could not be computed."""
    finish_reason: dict[str, Any] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.wire.input_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.wire.input_ids)

    @property
    def namespace(self) -> tuple[str, str, int]:
        """KV is shared only within it."""
        return (self.wire.extra_key, self.wire.cache_salt, 0 if self.adapter is None else self.adapter.uid)

    def append(self, token: int, logprob: float, label: str) -> None:
        """Add a sampled token of the weights called ``label``."""
        if not self.versions or self.versions[-1][0] != label:
            self.versions.append((label, self.output_tokens))
        self.tokens.append(token)
        self.logprobs.append(logprob)
