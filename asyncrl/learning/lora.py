"""What part of the model is trained, if not all of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.errors import ConfigError, require_count

__all__ = ["LoraConfig"]

_FROZEN = frozenset({"embed_tokens", "lm_head"})
_USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
        targets = self.target_modules
        named = isinstance(targets, tuple) and targets and all(type(name) is str and name for name in targets)
        if not named and targets != "all-linear":
            raise ConfigError.for_value("lora.target_modules", targets, "'all-linear' or a tuple of module names")
        frozen = [name for name in targets if named and name.rpartition(".")[2] in _FROZEN]
        if frozen:
            raise ConfigError.for_value(
                "lora.target_modules",
                frozen[0],
                "a linear layer inside the model: servers take no adapter of the embedding or the output layer, but of "
                f"{', '.join(_USUAL)} and the like",
            )

    def require_targets(self, linear: Iterable[str]) -> None:
        """Raise ``ConfigError`` for the first target that is none of ``linear``, the model's linear layers by path."""
        if isinstance(self.target_modules, str):
            return
        paths = set(linear)
        names = {path.rpartition(".")[2] for path in paths} - _FROZEN
        for target in self.target_modules:
            if not any(path == target or path.endswith("." + target) for path in paths):
                near = difflib.get_close_matches(target.rpartition(".")[2], sorted(names), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                allowed = f"linear layers of this model, which has {', '.join(sorted(names))}{hint}"
                raise ConfigError.for_value("lora.target_modules", target, allowed)
