"""The options of a run, each said once, and every combination of them that is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Literal

from asyncrl.checkpoint.options import Checkpointing
from asyncrl.errors import ConfigError, require_choice, require_count
from asyncrl.events import Events
from asyncrl.learning.advantages import Advantage, GroupCentered, MaxRL, group_by_group, ignores_groups
from asyncrl.learning.losses import Correction, KLPenalty, Loss, Normalize, compose, loss_from
from asyncrl.learning.options import Adam
from asyncrl.learning.overlong import OverlongPenalty
from asyncrl.rollout.engine import RolloutEngine
from asyncrl.scheduling.rules import (
    STALE_RULES,
    BatchOrder,
    ForwardBackwardBatch,
    GroupCompletion,
    StalePolicy,
    StaleRule,
    Truncation,
)
from asyncrl.scheduling.staleness import batches_ahead
from asyncrl.training.evaluation import Evaluator

__all__ = ["TrainingOptions"]

_MAY_CHANGE = (
    "engine",  # which has an identity of its own
    "evaluator",
    "allow_trajectory_loss",
    "allow_unbounded_staleness",
    "checkpointing",
    "events",
)
# Options that a resumed run need not have in common with the one that was stopped.


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingOptions:
    """What ``AsyncTrainer`` is called with, which says what each is. ``ConfigError`` for what cannot run."""

    engine: RolloutEngine
    groups_per_step: int
    optimizer: Adam
    group_size: int = 16
    minibatches: int = 1
    epochs: int = 1
    max_staleness: int = 2
    advantage: Advantage = field(default_factory=GroupCentered)
    completion: GroupCompletion = field(default_factory=GroupCompletion)
    loss: str | Loss = "cispo"
    correction: Correction | None = None
    kl: KLPenalty | None = None
    normalize: Normalize = "token"
    stale_policy: StalePolicy = "wait"
    batch_order: BatchOrder = "completion"
    repeat_dataset: bool = True
    truncation: Truncation = field(default_factory=Truncation)
    overlong: OverlongPenalty | None = None
    forward_backward_batch: ForwardBackwardBatch | Literal["auto"] | None = "auto"
    evaluator: Evaluator | None = None
    allow_trajectory_loss: bool = False
    allow_unbounded_staleness: bool = False
    checkpointing: Checkpointing | None = None
    events: Events = field(default_factory=Events)

    def __post_init__(self) -> None:
        for option in fields(self):
            if getattr(self, option.name) is None and option.default_factory is not MISSING:
                object.__setattr__(self, option.name, option.default_factory())  # None asks for the default
        object.__setattr__(self, "loss", loss_from(self.loss))
        _check(self)
        self.loss_object  # noqa: B018  # refuses what does not go together

    @cached_property
    def loss_object(self) -> Loss:
        """``loss``, which was made if it was a name, with ``correction`` and ``kl`` beside it."""
        return compose(loss_from(self.loss), correction=self.correction, kl=self.kl)

    @property
    def updates(self) -> int:
        """Optimizer steps for a batch, and so the most versions that it can make."""
        return self.minibatches * self.epochs

    @property
    def batches_ahead(self) -> int:
        """Batches that the bound allows to be sampled beside the one that is trained; 0: training is synchronous."""
        return batches_ahead(self.max_staleness, self.updates)

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

    def identity(self) -> Mapping[str, object]:
        """What decides on what is trained, by the names of the options: a resumed run must have it in common."""
        own = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in _MAY_CHANGE}
        return {**own, "sampling_policy": self.engine.sampling_policy, **self.engine.identity()}

    def require_versions(self, *, kept: bool) -> None:
        """Refuse a bound that needs older versions where the servers do not keep them (``kept``)."""
        settings = self.engine.settings
        if self.batches_ahead == 0 or kept:
            return
        gone = "but full weights on one server cannot be kept at an older version"
        if settings.kv_cache is None:
            raise ConfigError(
                f"max_staleness is {self.max_staleness} and sampling_policy is 'trajectory', {gone}: train a LoRA "
                "adapter, sample on two or more servers, use sampling_policy='segment', or set max_staleness=0"
            )
        within_bound = self.stale_rule.bounded and settings.kv_cache.max_staleness >= self.max_staleness
        if settings.keeps_version and not within_bound:
            raise ConfigError(
                f"kv_cache.on_limit is 'hold' with kv_cache.max_staleness {settings.kv_cache.max_staleness}, {gone}: "
                "train a LoRA adapter, use KVCache(on_limit='refill', allow_reprefill=True), or with "
                "stale_policy='wait' a kv_cache.max_staleness of at least max_staleness "
                f"({self.max_staleness}), which is then never exceeded"
            )

    def possible_losses(self) -> Iterator[tuple[str, str]]:
        """What the chosen rules can lose: name and reason, said once when a run starts."""
        if self.stale_rule.notice:
            yield self.stale_rule.notice, self.stale_rule.reason
        if self.completion.stragglers == "truncate":
            yield (
                "stragglers_truncated",
                "completion.on_stragglers='truncate' ends the slowest members of a group before they are done",
            )
        if self.completion.stragglers == "discard":
            yield (
                "stragglers_discarded",
                "completion.on_stragglers='discard' throws the slowest members of a group away: what is trained is "
                "biased to fast trajectories",
            )
        if self.truncation.loses_trajectories:
            yield "truncated_dropped", "truncation drops trajectories"


# Users call ``AsyncTrainer``: that is what a ``TypeError`` about a keyword names.
TrainingOptions.__init__.__qualname__ = "AsyncTrainer.__init__"


def _check(options: TrainingOptions) -> None:
    require_count("groups_per_step", options.groups_per_step, least=1)
    require_count("group_size", options.group_size, least=1)
    require_count("max_staleness", options.max_staleness, least=0)
    _check_updates(options)
    require_choice("normalize", options.normalize, Normalize)
    require_choice("stale_policy", options.stale_policy, StalePolicy)
    require_choice("batch_order", options.batch_order, BatchOrder)
    _check_sampling(options)
    _check_overlap(options)
    _check_completion(options)
    factor = options.engine.schedule.oversample_factor
    if options.batches_ahead == 0 and factor != 1:
        raise ConfigError(
            f"schedule.oversample_factor is {factor} and max_staleness is {options.max_staleness}: a synchronous run "
            "admits its batch only; use oversample_factor=1 or max_staleness of at least "
            f"{_least_ahead(options)}"
        )
    if not options.stale_rule.bounded and (not options.repeat_dataset or options.batch_order == "admission"):
        raise ConfigError(
            f"stale_policy is {options.stale_policy!r}: repeat_dataset=False and batch_order='admission' need 'wait'"
        )
    if options.overlong is not None and isinstance(options.advantage, MaxRL):
        raise ConfigError(
            "overlong is set and advantage is MaxRL, which divides by mean rewards: a penalty makes rewards negative; "
            "use truncation, or another advantage"
        )
    _check_acknowledged(options)


def _check_updates(options: TrainingOptions) -> None:
    require_count("minibatches", options.minibatches, least=1)
    require_count("epochs", options.epochs, least=1)
    if options.minibatches > options.groups_per_step:
        allowed = f"at most groups_per_step ({options.groups_per_step}): each part of a batch is whole groups"
        raise ConfigError.for_value("minibatches", options.minibatches, allowed)
    if options.max_staleness < options.updates - 1:
        raise ConfigError(
            f"max_staleness is {options.max_staleness}, and a batch makes minibatches * epochs = {options.updates} "
            f"versions: its last update trains tokens that are at least {options.updates - 1} versions old; use "
            f"max_staleness of at least {options.updates - 1} ({_least_ahead(options)} to sample while training), or "
            "fewer minibatches or epochs"
        )


def _least_ahead(options: TrainingOptions) -> int:
    """The smallest bound with which a batch is sampled ahead."""
    return 2 * options.updates - 1


def _check_sampling(options: TrainingOptions) -> None:
    settings = options.engine.settings
    if settings.temperature == 0:
        raise ConfigError("temperature is 0: greedy samples have no log-probability to train on; use more than 0")
    if settings.top_p != 1 or settings.top_k != -1:
        raise ConfigError(
            f"top_p is {settings.top_p} and top_k is {settings.top_k}: the learner computes the full "
            "distribution, so training needs top_p=1 and top_k=-1"
        )
    options.require_versions(kept=options.engine.policy.keeps_versions(settings.kv_cache))


def _against_overlap(options: TrainingOptions) -> Iterator[str]:
    """Why groups cannot be trained before their batch is complete."""
    if options.updates > 1:
        yield (
            f"minibatches * epochs is {options.updates}, and a batch is divided into updates when all of it is there: "
            "it must be 1"
        )
    if options.max_staleness > 0:
        bound = f"max_staleness is {options.max_staleness}"
        yield f"{bound}, and explicit chunks are for synchronous runs (max_staleness=0)"
    if not options.stale_rule.bounded:
        yield f"stale_policy is {options.stale_policy!r} and must be 'wait'"
    if options.completion.mode != "wait":
        yield f"completion.mode is {options.completion.mode!r} and must be 'wait'"
    if options.engine.sampling_policy != "trajectory":
        yield f"sampling_policy is {options.engine.sampling_policy!r} and must be 'trajectory'"
    if group_by_group(options.advantage) is None:
        yield (
            f"advantage is {options.advantage!r} and must be GroupCentered(), LeaveOneOut() or MaxRL() itself: any "
            "other, and a subclass too, may need the rewards of the whole batch"
        )


def _check_overlap(options: TrainingOptions) -> None:
    chosen = options.forward_backward_batch
    if chosen == "auto" or chosen is None:
        return
    if not isinstance(chosen, ForwardBackwardBatch):
        raise ConfigError.for_value("forward_backward_batch", chosen, "'auto', None or a ForwardBackwardBatch")
    if reasons := list(_against_overlap(options)):
        raise ConfigError(
            f"forward_backward_batch is set, but {'; '.join(reasons)}. Change that, or leave "
            "forward_backward_batch='auto', which overlaps only where it can"
        )


def _check_completion(options: TrainingOptions) -> None:
    completion = options.completion
    if options.group_size < completion.min_members:
        raise ConfigError.for_value(
            "group_size", options.group_size, f"at least completion.min_members ({completion.min_members})"
        )
    if completion.stragglers == "carry_over":
        carried = "completion.on_stragglers is 'carry_over', which divides a group between batches"
        if not ignores_groups(options.advantage):
            raise ConfigError(
                f"{carried}, and advantage is {options.advantage!r}, which may need them together: a late member has "
                "no group to be centred in; use advantage=Batchwise()"
            )
        if options.normalize == "prompt":
            raise ConfigError(f"{carried}: normalize='prompt' would count it twice; use 'token', 'sequence' or 'batch'")
        if options.batches_ahead == 0:
            raise ConfigError(
                f"{carried}, and max_staleness is {options.max_staleness}: a late member would be too old; use at "
                f"least {_least_ahead(options)}"
            )
    if options.stale_rule.bounded and not completion.whole_groups:
        raise ConfigError(
            f"completion.on_stragglers is {completion.on_stragglers!r} and stale_policy is 'wait', which needs whole "
            "groups: use on_stragglers='truncate', or stale_policy='mask_span' or 'keep'"
        )


def _check_acknowledged(options: TrainingOptions) -> None:
    """Refuse options that can lose training data or the bound unless the user said so."""
    losses, rule = dict(options.possible_losses()), options.stale_rule
    unbounded = losses.pop(rule.notice) if rule.unbounded else None
    if losses and not options.allow_trajectory_loss:
        raise ConfigError(f"{'; '.join(losses.values())}: acknowledge it with allow_trajectory_loss=True")
    if unbounded is not None and not options.allow_unbounded_staleness:
        raise ConfigError(f"{unbounded}: acknowledge it with allow_unbounded_staleness=True")
