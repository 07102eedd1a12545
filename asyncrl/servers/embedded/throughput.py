"""How many tokens a second an engine samples, by its last steps: what a server's report of its load says."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

import anyio

__all__ = ["Throughput"]

_KEPT = 0.9
# Of what was measured, after each further measurement.


class Sampling(Protocol):
    """What counts its tokens: an ``Engine``."""

    sampled_tokens: int


class Throughput:
    """Sums over the last steps. A step that never ends counts for longer and longer, so that a hang shows."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def now(self) -> float:
        """Tokens per second; zero if nothing was measured."""
        running_s = 0.0 if self._since is None else anyio.current_time() - self._since
        seconds = self._seconds + running_s
        return self._tokens / seconds if seconds > 0 else 0.0

    @contextmanager
    def measured(self, engine: Sampling) -> Generator[None, None, None]:
        """Measure what ``engine`` does inside the block."""
        tokens, self._since = engine.sampled_tokens, anyio.current_time()
        try:
            yield
        finally:
            self._seconds = self._seconds * _KEPT + anyio.current_time() - self._since
            self._tokens = self._tokens * _KEPT + engine.sampled_tokens - tokens
            self._since = None
