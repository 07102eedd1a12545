"""What users say about learning: optimizer, learning-rate schedule, adapter. The steps themselves are the learner's."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from asyncrl.errors import ConfigError, require_count
from asyncrl.learning.base import OptimizerSettings

__all__ = ["Adam", "LearningRateSchedule", "LoraConfig", "RateCurve", "Sharing", "constant", "cosine", "linear"]

Sharing: TypeAlias = Literal["auto", "off"]
"""Whether sequences share what they begin with."""

_FROZEN = frozenset({"embed_tokens", "lm_head"})
_USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LearningRateSchedule(Protocol):
    """A factor of the learning rate for batch ``n`` (from 0) of ``steps``; it counts batches without gradient too."""

    def __call__(self, n: int, steps: int) -> float:
        """More than 0: a step that changes nothing would make a version of nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Linear warm-up over ``warmup`` steps, then constant, or down to ``floor`` in a line or half a cosine.

    The floor is where the step after the last one would be, so that every step has a rate above 0, also with floor 0.
    """

    kind: Literal["constant", "linear", "cosine"]
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        require_count("optimizer.warmup", self.warmup, least=0)
        if not 0 <= self.floor <= 1:
            raise ConfigError.for_value("optimizer.floor", self.floor, "between 0 and 1")

    def __call__(self, n: int, steps: int) -> float:
        """The factor of batch ``n`` (from 0) of ``steps``; the last one's for any later batch."""
        if n < self.warmup:
            return (n + 1) / self.warmup
        progress = max(0, min(n, steps - 1) - self.warmup) / max(1, steps - self.warmup)
        match self.kind:
            case "constant":
                left = 1.0
            case "linear":
                left = 1 - progress
            case "cosine":
                left = (1 + math.cos(math.pi * progress)) / 2
        return self.floor + (1 - self.floor) * left


def constant(*, warmup: int = 0) -> RateCurve:
    """The same learning rate in every step, for ``Adam(schedule=..)``.

    ``warmup``: steps in which the learning rate rises from near 0 to ``lr``.
    """
    return RateCurve(kind="constant", warmup=warmup)


def linear(*, warmup: int = 0, floor: float = 0.0) -> RateCurve:
    """A learning rate that falls in a straight line, for ``Adam(schedule=..)``.

    ``warmup``: steps in which the learning rate rises from near 0 to ``lr``.
    ``floor``: the least learning rate that the line goes down to, as a part of ``lr``.
    """
    return RateCurve(kind="linear", warmup=warmup, floor=floor)


def cosine(*, warmup: int = 0, floor: float = 0.0) -> RateCurve:
    """A learning rate that falls as half a cosine, for ``Adam(schedule=..)``.

    ``warmup``: steps in which the learning rate rises from near 0 to ``lr``.
    ``floor``: the least learning rate that the schedule goes down to, as a part of ``lr``.
    """
    return RateCurve(kind="cosine", warmup=warmup, floor=floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    lr: float
    """Learning rate: 1e-6 to 1e-5 is usual for all weights, ten times as much for an adapter."""
    beta1: float = 0.9
    """How much of the mean gradient is kept from step to step; the usual value."""
    beta2: float = 0.95
    """How much of the mean squared gradient is kept. Shorter memory than the usual 0.999: rewards, and with them
    gradients, change quickly."""
    eps: float = 1e-8
    """Added to the divisor, so that a gradient of zero divides nothing by zero; the usual value."""
    weight_decay: float = 0.0
    """Part of each weight, times the learning rate, that a step takes away; 0: few steps of RL need none."""
    grad_clip_norm: float | None = None
    """Largest norm of the whole gradient; None does not clip."""
    schedule: LearningRateSchedule | None = None
    """``constant``, ``linear``, ``cosine`` or a function of your own; None keeps ``lr`` constant."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError.for_value("optimizer.lr", self.lr, "a finite number of more than 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError.for_value(f"optimizer.{name}", getattr(self, name), "at least 0 and less than 1")
        if not self.eps > 0:
            raise ConfigError.for_value("optimizer.eps", self.eps, "more than 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError.for_value("optimizer.weight_decay", self.weight_decay, "at least 0")
        if self.grad_clip_norm is not None and not self.grad_clip_norm > 0:
            raise ConfigError.for_value("optimizer.grad_clip_norm", self.grad_clip_norm, "more than 0")

    def check_schedule(self, steps: int) -> None:
        """Raises ``ConfigError`` if some step of a run of ``steps`` has no usable rate, before the first is taken."""
        if self.schedule is not None:
            for n in range(steps):
                self.settings(n, steps)

    def settings(self, n: int, steps: int) -> OptimizerSettings:
        """The numbers for batch ``n`` (from 0) of ``steps``."""
        factor = 1.0 if self.schedule is None else self.schedule(n, steps)
        if not 0 < self.lr * factor < math.inf:
            allowed = "a finite number above 0, because a step without a learning rate trains nothing"
            raise ConfigError.for_value(f"optimizer.schedule({n}, {steps})", factor, allowed)
        return OptimizerSettings(
            lr=self.lr * factor,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.grad_clip_norm,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter (arXiv 2106.09685) with the scale ``alpha / r``.

    ``target_modules``: "all-linear" or names of linear layers ("q_proj", ..). Embeddings and the output layer stay
    frozen.
    """

    r: int = 16
    """Rank: how many directions each layer can be changed in. Servers must be started for at least this rank."""
    alpha: float = 32
    """The adapter's output is scaled by alpha / r; with twice the rank that is 2."""
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
