"""The trainer's settings, and every combination of them that is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError, require_choice, require_count
from asyncrl.learning.advantages import Advantage, Batchwise, GroupCentered
from asyncrl.learning.losses import Loss, Normalize
from asyncrl.learning.optimizer import Adam
from asyncrl.rollout.engine import RolloutEngine
from asyncrl.rollout.trajectory import SamplingSettings
from asyncrl.scheduling.rules import (
    STALE_RULES,
    BatchOrder,
    ForwardBackwardBatch,
    GroupCompletion,
    SamplingPolicy,
    StalePolicy,
    StaleRule,
    Truncation,
)

__all__ = ["TrainingPlan", "check_acknowledged", "check_plan", "check_versions", "possible_losses"]


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
    sampling_policy: SamplingPolicy
    batch_order: BatchOrder
    repeat_dataset: bool
    truncation: Truncation
    forward_backward_batch: ForwardBackwardBatch | Literal["auto"] | None

    @property
    def stale_rule(self) -> StaleRule:
        """What is done about spans older than ``max_staleness``."""
        return STALE_RULES[self.stale_policy]

    @property
    def overlap(self) -> ForwardBackwardBatch | None:
        """The rule by which finished groups are trained before their batch is complete; None trains whole batches."""
        if isinstance(self.forward_backward_batch, ForwardBackwardBatch):
            return self.forward_backward_batch
        automatic = self.forward_backward_batch == "auto" and not any(_against_overlap(self))
        return ForwardBackwardBatch() if automatic else None


def _against_overlap(plan: TrainingPlan) -> Iterator[str]:
    """Why groups cannot be trained before their batch is complete."""
    if plan.max_staleness > 0:
        yield f"max_staleness is {plan.max_staleness}, and explicit chunks are for synchronous runs (max_staleness=0)"
    if not plan.stale_rule.bounded:
        yield f"stale_policy is {plan.stale_policy!r} and must be 'wait'"
    if plan.completion.mode != "wait":
        yield f"completion.mode is {plan.completion.mode!r} and must be 'wait'"
    if plan.sampling_policy != "trajectory":
        yield f"sampling_policy is {plan.sampling_policy!r} and must be 'trajectory'"
    if type(plan.advantage) is not GroupCentered:
        yield (
            f"advantage is {plan.advantage!r} and must be GroupCentered() itself: any other, and a subclass too, may "
            "need the rewards of the whole batch"
        )


def check_plan(plan: TrainingPlan, engine: RolloutEngine) -> None:
    """Refuse what cannot run, with the reason and what to change."""
    require_count("groups_per_step", plan.groups_per_step, least=1)
    require_count("group_size", plan.group_size, least=1)
    require_count("max_staleness", plan.max_staleness, least=0)
    require_choice("normalize", plan.normalize, Normalize)
    require_choice("stale_policy", plan.stale_policy, StalePolicy)
    require_choice("batch_order", plan.batch_order, BatchOrder)
    _check_sampling(plan, engine)
    _check_overlap(plan)
    _check_completion(plan)
    if plan.max_staleness == 0 and engine.schedule.oversample_factor != 1:
        raise ConfigError(
            f"schedule.oversample_factor is {engine.schedule.oversample_factor} and max_staleness is 0: a synchronous "
            "run admits its batch only; use oversample_factor=1 or max_staleness of at least 1"
        )
    if not plan.stale_rule.bounded and (not plan.repeat_dataset or plan.batch_order == "admission"):
        raise ConfigError(
            f"stale_policy is {plan.stale_policy!r}: repeat_dataset=False and batch_order='admission' need 'wait'"
        )


def _check_sampling(plan: TrainingPlan, engine: RolloutEngine) -> None:
    settings = engine.settings
    if settings.temperature == 0:
        raise ConfigError("temperature is 0: greedy samples have no log-probability to train on; use more than 0")
    if settings.top_p != 1 or settings.top_k != -1:
        raise ConfigError(
            f"top_p is {settings.top_p} and top_k is {settings.top_k}: the learner computes the full "
            "distribution, so training needs top_p=1 and top_k=-1"
        )
    check_versions(plan, kept=engine.policy.keeps_versions(settings.kv_cache), settings=settings)


def check_versions(plan: TrainingPlan, *, kept: bool, settings: SamplingSettings) -> None:
    """Refuse a bound that needs older versions where the servers do not keep them (``kept``)."""
    if plan.max_staleness == 0 or kept:
        return
    gone = "but full weights on one server cannot be kept at an older version"
    if settings.kv_cache is None:
        raise ConfigError(
            f"max_staleness is {plan.max_staleness} and sampling_policy is 'trajectory', {gone}: train a LoRA adapter, "
            "sample on two or more servers, use sampling_policy='segment', or set max_staleness=0"
        )
    within_bound = plan.stale_rule.bounded and settings.kv_cache.max_staleness >= plan.max_staleness
    if settings.keeps_version and not within_bound:
        raise ConfigError(
            f"kv_cache.on_limit is 'hold' with kv_cache.max_staleness {settings.kv_cache.max_staleness}, {gone}: train "
            "a LoRA adapter, use KVCache(on_limit='refill', allow_reprefill=True), or with stale_policy='wait' a "
            f"kv_cache.max_staleness of at least max_staleness ({plan.max_staleness}), which is then never exceeded"
        )


def _check_overlap(plan: TrainingPlan) -> None:
    option = plan.forward_backward_batch
    if option == "auto" or option is None:
        return
    if not isinstance(option, ForwardBackwardBatch):
        raise ConfigError.for_value("forward_backward_batch", option, "'auto', None or a ForwardBackwardBatch")
    if reasons := list(_against_overlap(plan)):
        raise ConfigError(
            f"forward_backward_batch is set, but {'; '.join(reasons)}. Change that, or leave "
            "forward_backward_batch='auto', which overlaps only where it can"
        )


def _check_completion(plan: TrainingPlan) -> None:
    completion = plan.completion
    if plan.group_size < completion.min_members:
        raise ConfigError.for_value(
            "group_size", plan.group_size, f"at least completion.min_members ({completion.min_members})"
        )
    if completion.stragglers == "carry_over":
        carried = "completion.on_stragglers is 'carry_over', which divides a group between batches"
        if type(plan.advantage) is not Batchwise:
            raise ConfigError(
                f"{carried}, and advantage is {plan.advantage!r}, which may need them together: a late member has no "
                "group to be centred in; use advantage=Batchwise()"
            )
        if plan.normalize == "prompt":
            raise ConfigError(f"{carried}: normalize='prompt' would count it twice; use 'token', 'sequence' or 'batch'")
        if plan.max_staleness == 0:
            raise ConfigError(f"{carried}, and max_staleness is 0: a late member would be too old; use at least 1")
    if plan.stale_rule.bounded and not completion.whole_groups:
        raise ConfigError(
            f"completion.on_stragglers is {completion.on_stragglers!r} and stale_policy is 'wait', which needs whole "
            "groups: use on_stragglers='truncate', or stale_policy='mask_span' or 'keep'"
        )


def check_acknowledged(plan: TrainingPlan, *, trajectory_loss: bool, unbounded: bool) -> None:
    """Refuse options that can lose training data or the bound unless the user said so."""
    losses = dict(possible_losses(plan))
    unbounded_reason = losses.pop(plan.stale_rule.notice) if plan.stale_rule.unbounded else None
    if losses and not trajectory_loss:
        raise ConfigError(f"{'; '.join(losses.values())}: acknowledge it with allow_trajectory_loss=True")
    if unbounded_reason is not None and not unbounded:
        raise ConfigError(f"{unbounded_reason}: acknowledge it with allow_unbounded_staleness=True")


def possible_losses(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """What the chosen rules can lose: name and reason, said once when a run starts."""
    if plan.stale_rule.notice:
        yield plan.stale_rule.notice, plan.stale_rule.reason
    if plan.completion.stragglers == "truncate":
        yield (
            "stragglers_truncated",
            "completion.on_stragglers='truncate' ends the slowest members of a group before they are done",
        )
    if plan.completion.stragglers == "discard":
        yield (
            "stragglers_discarded",
            "completion.on_stragglers='discard' throws the slowest members of a group away: what is trained is biased "
            "to fast trajectories",
        )
    if plan.truncation.loses_trajectories:
        yield "truncated_dropped", "truncation drops trajectories"
