"""A softer end than truncation: answers that come near a length cost reward before they reach it."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.errors import ConfigError, require_count

__all__ = ["OverlongPenalty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """-penalty * (tokens - (max_tokens - buffer)) / buffer, between 0 and -penalty (DAPO, arXiv 2503.14476).

    ``tokens`` are those that the model generated in the whole trajectory. It is added to the reward that is trained
    with, after what ``truncation`` makes of it; the reward that is logged stays as it is.
    Example: ``OverlongPenalty(max_tokens=100, buffer=20)`` is 0 up to 80 tokens, -0.5 at 90, and -1 from 100 on.
    """

    max_tokens: int
    """From here on the whole penalty counts."""
    buffer: int
    """It grows in a line over this many tokens before that."""
    penalty: float = 1.0
    """The most that it takes off a reward."""

    def __post_init__(self) -> None:
        require_count("overlong.max_tokens", self.max_tokens, least=1)
        require_count("overlong.buffer", self.buffer, least=1)
        if self.buffer > self.max_tokens:
            raise ConfigError.for_value("overlong.buffer", self.buffer, f"at most max_tokens ({self.max_tokens})")
        if not 0 < self.penalty < float("inf"):
            raise ConfigError.for_value("overlong.penalty", self.penalty, "a finite number of more than 0")

    def of(self, tokens: int) -> float:
        """What is added to the reward of a trajectory with so many generated tokens."""
        into = tokens - (self.max_tokens - self.buffer)
        return -self.penalty * min(1.0, into / self.buffer) if into > 0 else 0.0
