"""What part of the model is trained, if not all of it."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.scheduling.rules import require_count

__all__ = ["LoraConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter (arXiv 2106.09685) with the scale ``alpha / r``.

    ``target_modules``: "all-linear" or names of linear layers ("q_proj", ..). Embeddings and the output layer stay
    frozen.
    """

    r: int = 16
    alpha: float = 32
    target_modules: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        require_count("lora.r", self.r, least=1)
        if not self.alpha > 0:
            raise ConfigError.for_value("lora.alpha", self.alpha, "more than 0")
        named = isinstance(self.target_modules, tuple) and self.target_modules
        if not named and self.target_modules != "all-linear":
            raise ConfigError.for_value(
                "lora.target_modules", self.target_modules, "'all-linear' or a tuple of module names"
            )
