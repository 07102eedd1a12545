"""Losses by name, as recipes ask for them."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from asyncrl.errors import ConfigError
from asyncrl.learning.losses.base import Loss
from asyncrl.learning.losses.cispo import CISPO
from asyncrl.learning.losses.policygradient import ImportanceSampling, PolicyGradient
from asyncrl.learning.losses.ppo import PPO, DecoupledPPO

__all__ = ["loss_from", "loss_kinds"]

_Kind: TypeAlias = type[CISPO] | type[PPO] | type[DecoupledPPO] | type[ImportanceSampling] | type[PolicyGradient]
_KINDS: tuple[_Kind, ...] = (CISPO, PPO, DecoupledPPO, ImportanceSampling, PolicyGradient)


def loss_kinds() -> dict[str, _Kind]:
    """The losses that can be asked for by name."""
    return {kind.name: kind for kind in _KINDS}


def loss_from(loss: str | Loss, **options: float) -> Loss:
    """A loss by name with its ``options``, or the object itself; ``ConfigError`` for an unknown name or option."""
    if not isinstance(loss, str):
        if options:
            raise ConfigError(f"loss options {sorted(options)} go into the loss object {loss!r}")
        return loss
    kinds = loss_kinds()
    if loss not in kinds:
        raise ConfigError.for_unknown_key(loss, kinds, where="loss")
    kind = kinds[loss]
    known = [field.name for field in dataclasses.fields(kind)]
    for option, value in options.items():
        if option not in known:
            raise ConfigError.for_unknown_key(option, known, where=f"loss {loss!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError.for_value(f"loss.{option}", value, "a number")
    return kind(**options)
