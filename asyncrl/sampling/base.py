"""The seam between rollouts and whatever samples: one request, one segment."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from asyncrl.types import IntArray, Segment

__all__ = ["ModelRef", "Sampler", "SegmentRequest"]


@dataclass(slots=True, kw_only=True)
class ModelRef:
    """The model that is to answer a request: adapter (LoRA only), prefix-cache namespace, and which servers have it.

    Not to be changed, but quick to make.
    """

    adapter: str | None
    extra_key: str
    replica: bool = False
    """Servers hold different base weights: only one that holds this version may answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class SegmentRequest:
    """One sampling request: exact ids in, at most ``max_new_tokens`` ids out. Not to be changed, but quick to make."""

    trajectory_id: str
    """Sticky routing: requests of one trajectory go to the server that holds its prefix."""
    input_ids: IntArray
    """(T,) the whole context."""
    max_new_tokens: int
    version: int
    """The policy version that this request is stamped with at dispatch."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Where the server can honour it."""
    adapter: str | None = None
    """Name of the LoRA adapter that is this version, None for the base weights."""
    extra_key: str = ""
    """Prefix-cache namespace: KV is reused only within it."""
    anchor: int | None = None
    """The version that computed the prefix of that namespace; None: ``version`` itself."""
    replica: bool = False
    """True: only a server whose base weights are ``version`` may answer."""


class Sampler(Protocol):
    """What samples segments. Real: ``SGLang``. Fake: ``asyncrl.testing.ScriptedSampler``."""

    def opened(self) -> AbstractAsyncContextManager[object]:
        """Connections, from the first request to the last."""
        ...

    async def sample(self, request: SegmentRequest) -> Segment:
        """Sample one segment.

        Cancelling it aborts the request on the server. Raises ``SamplingError``: ``RequestRefused`` at once,
        ``ServerUnavailable`` after its retries, ``ProtocolError`` for an answer that must not be trained.
        """
        ...
