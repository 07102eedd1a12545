"""Losses by name, as recipes ask for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.learning.losses.base import Loss, NamedLoss
from asyncrl.learning.losses.cispo import CISPO
from asyncrl.learning.losses.dppo import DPPO
from asyncrl.learning.losses.geometric import GeometricMean
from asyncrl.learning.losses.gspo import GSPO
from asyncrl.learning.losses.icepop import IcePop
from asyncrl.learning.losses.policygradient import ImportanceSampling, PolicyGradient
from asyncrl.learning.losses.ppo import PPO, DecoupledPPO
from asyncrl.learning.losses.sapo import SAPO

__all__ = ["loss_from", "loss_kinds"]

_KINDS: tuple[type[NamedLoss], ...] = (
    CISPO,
    PPO,
    DecoupledPPO,
    GSPO,
    DPPO,
    IcePop,
    SAPO,
    GeometricMean,
    ImportanceSampling,
    PolicyGradient,
)


_TAKEN = frozenset({"loss", "entropy", "computed_tokens"})


def loss_kinds() -> dict[str, type[NamedLoss]]:
    """The losses that can be asked for by name."""
    return {kind.name: kind for kind in _KINDS}


def loss_from(loss: str | Loss, **options: float | str) -> Loss:
    """A loss by name with its ``options``, or the object itself.

    Raises ``ConfigError`` for an unknown name or option, and for an object that is no ``Loss``.
    """
    if not isinstance(loss, str):
        if options:
            raise ConfigError(f"loss options {sorted(options)} go into the loss object {loss!r}")
        _require_loss(loss)
        return loss
    kinds = loss_kinds()
    if loss not in kinds:
        raise ConfigError.for_unknown_key(loss, kinds, where="loss")
    kind = kinds[loss]
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for option, value in options.items():
        if option not in defaults:
            raise ConfigError.for_unknown_key(option, defaults, where=f"loss {loss!r}")
        _require_kind(f"loss.{option}", value, text=isinstance(defaults[option], str))
    values: dict[str, Any] = options
    return kind(**values)


def _require_loss(loss: Loss) -> None:
    missing = [name for name in ("token_data", "diagnostics", "per_token") if not hasattr(loss, name)]
    if missing or isinstance(loss, type):
        kind = "a class" if isinstance(loss, type) else f"an object without {', '.join(missing)}"
        allowed = (
            "a name, or an object with token_data, diagnostics and per_token, as asyncrl.learning.losses.Loss says"
        )
        raise ConfigError(f"loss is {loss!r}, {kind}, but must be {allowed}")
    taken = sorted(_TAKEN.intersection(loss.diagnostics))
    if taken:
        raise ConfigError.for_value("loss.diagnostics", taken[0], "a name that the learner does not report itself")


def _require_kind(key: str, value: object, *, text: bool) -> None:
    if text:
        if not isinstance(value, str):
            raise ConfigError.for_value(key, value, "a text")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError.for_value(key, value, "a number")
