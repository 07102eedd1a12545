"""The trainer's settings, and every combination of them that is refused before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.engine import RolloutEngine
from asyncrl.errors import ConfigError
from asyncrl.learning.advantages import Advantage, GroupCentered
from asyncrl.learning.losses import Loss
from asyncrl.learning.normalize import Normalize
from asyncrl.learning.optimizer import Adam
from asyncrl.scheduling.rules import (
    BatchOrder,
    ForwardBackwardBatch,
    GroupCompletion,
    StalePolicy,
    Truncation,
    require_choice,
    require_count,
)

__all__ = ["TrainingPlan", "check_acknowledged", "check_plan", "overlap_rule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """What ``AsyncTrainer`` was given, defaults filled in; its docstring says what each means."""

    optimizer: Adam
    advantage: Advantage
    completion: GroupCompletion
    loss: Loss
    normalize: Normalize
    groups_per_step: int
    group_size: int
    max_staleness: int
    stale_policy: StalePolicy
    batch_order: BatchOrder
    repeat_dataset: bool
    truncation: Truncation
    overlap: ForwardBackwardBatch | None


def overlap_rule(
    option: ForwardBackwardBatch | Literal["auto"] | None,
    max_staleness: int,
    stale_policy: StalePolicy,
    advantage: Advantage,
) -> ForwardBackwardBatch | None:
    """The chunk rule of a synchronous run that can overlap, else None."""
    possible = max_staleness == 0 and stale_policy == "wait" and type(advantage) is GroupCentered
    if option == "auto":
        return ForwardBackwardBatch() if possible else None
    if option is None:
        return None
    if not isinstance(option, ForwardBackwardBatch):
        raise ConfigError.for_value("forward_backward_batch", option, "'auto', None or a ForwardBackwardBatch")
    if max_staleness > 0:
        raise ConfigError(
            f"forward_backward_batch is set and max_staleness is {max_staleness}: explicit chunks are for synchronous "
            "runs; leave forward_backward_batch='auto', or set max_staleness=0"
        )
    if not possible:
        raise ConfigError(
            "forward_backward_batch needs stale_policy='wait' and advantage=GroupCentered(): any other advantage needs "
            "the rewards of the whole batch; leave forward_backward_batch='auto'"
        )
    return option


def check_plan(plan: TrainingPlan, engine: RolloutEngine) -> None:
    """Refuse what cannot run, with the reason and what to change."""
    require_count("groups_per_step", plan.groups_per_step, least=1)
    require_count("group_size", plan.group_size, least=1)
    require_count("max_staleness", plan.max_staleness, least=0)
    require_choice("normalize", plan.normalize, Normalize)
    require_choice("stale_policy", plan.stale_policy, StalePolicy)
    require_choice("batch_order", plan.batch_order, BatchOrder)
    settings = engine.settings
    if settings.temperature == 0:
        raise ConfigError("temperature is 0: greedy samples have no log-probability to train on; use more than 0")
    if settings.top_p != 1 or settings.top_k != -1:
        raise ConfigError(
            f"top_p is {settings.top_p} and top_k is {settings.top_k}: the learner computes the full "
            "distribution, so training needs top_p=1 and top_k=-1"
        )
    if plan.group_size < plan.completion.min_members:
        raise ConfigError.for_value(
            "group_size", plan.group_size, f"at least completion.min_members ({plan.completion.min_members})"
        )
    if plan.max_staleness == 0 and engine.schedule.oversample_factor != 1:
        raise ConfigError(
            f"schedule.oversample_factor is {engine.schedule.oversample_factor} and max_staleness is 0: a synchronous "
            "run admits its batch only; use oversample_factor=1 or max_staleness of at least 1"
        )
    if plan.stale_policy != "wait" and (not plan.repeat_dataset or plan.batch_order == "admission"):
        raise ConfigError(
            f"stale_policy is {plan.stale_policy!r}: repeat_dataset=False and batch_order='admission' need 'wait'"
        )
    if plan.max_staleness > 0 and engine.sampling_policy == "trajectory" and not engine.policy.pins_versions:
        raise ConfigError(
            f"max_staleness is {plan.max_staleness} and sampling_policy is 'trajectory', but full weights on the "
            "servers cannot be kept at an older version: train a LoRA adapter, use sampling_policy='segment', or set "
            "max_staleness=0"
        )


def check_acknowledged(plan: TrainingPlan, *, trajectory_loss: bool, unbounded: bool) -> None:
    """Refuse options that can lose training data or the bound unless the user said so."""
    losing = []
    if plan.stale_policy == "mask_span":
        losing.append("stale_policy='mask_span' gives spans older than max_staleness no gradient")
    if plan.truncation.loses_trajectories:
        losing.append("truncation drops trajectories")
    if losing and not trajectory_loss:
        raise ConfigError(f"{'; '.join(losing)}: acknowledge it with allow_trajectory_loss=True")
    if plan.stale_policy == "keep" and not unbounded:
        raise ConfigError("stale_policy='keep' has no bound on age: acknowledge it with allow_unbounded_staleness=True")
