"""From the groups of a step to training sequences: rewards, advantages, weights, masks, and the step's one divisor.

Chunks can be trained before the batch is complete. Whatever factor needs the whole batch (the divisor of
``normalize``, a batch-wide standard deviation) is kept out of the sequences and divided once at the optimizer step,
so the gradient does not depend on how the batch was cut or in which order its groups came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from asyncrl.errors import StalenessError
from asyncrl.learning.advantages import Advantage, GroupCentered, Rewards
from asyncrl.learning.base import ChunkResult, TrainingSequence
from asyncrl.learning.losses import Divisor, Normalize, token_weight
from asyncrl.scheduling.rules import STALE_RULES, StalePolicy, Truncation
from asyncrl.types import DropReason, Group, Span, SpanKind, Trajectory

__all__ = ["StepAssembly"]

_Placed: TypeAlias = tuple[int, int, int, Span]
"""Tokens ``start <= i < stop`` of a conversation are of this version and span."""


class StepAssembly:
    """Adds up one trainer step: ``add`` its chunks, ``finish`` once, then read ``divisor``.

    ``version`` is committed while the step trains. ``stale_policy`` decides about spans older than ``max_staleness``;
    where the barrier should have kept them away, they raise ``StalenessError``.
    """

    def __init__(
        self,
        *,
        advantage: Advantage,
        normalize: Normalize,
        truncation: Truncation,
        min_members: int,
        temperature: float,
        version: int,
        max_staleness: int,
        stale_policy: StalePolicy,
    ) -> None:
        self._advantage = advantage
        # What a subclass overrides may need the whole batch: it is asked for all of it, as any other function is.
        self._centered = advantage if type(advantage) is GroupCentered else None
        self._normalize = normalize
        self._truncation = truncation
        self._min_members = min_members
        self._temperature = temperature
        self._version = version
        self._max_staleness = max_staleness
        self._stale_rule = STALE_RULES[stale_policy]
        self._oldest = 0 if self._stale_rule.unbounded else max(0, version - max_staleness)
        # Of the versions that are trained.
        self._groups: list[Group] = []
        # Those of them whose advantages need the rewards of the whole batch.
        self._waiting: list[Group] = []
        self._divisor = Divisor(normalize)
        self._active_groups: set[int] = set()
        self._scale = 1.0
        # What all advantages of the batch are divided by.
        self._silent = 0
        self._wasted = 0
        self._tokens = 0
        self._sums: Counter[str] = Counter()

    def add(self, groups: Sequence[Group]) -> list[TrainingSequence]:
        """The sequences of a chunk that can be trained before the batch is complete."""
        self._groups += groups
        self._drop_truncated(groups)
        sequences: list[TrainingSequence] = []
        for group in groups:
            rewards = self._rewards(group)
            present = [reward for reward in rewards if reward is not None]
            if self._centered is not None and len(present) >= self._min_members:
                sequences += self._sequences(group, self._centered.center(rewards, baseline=present))
            else:
                self._waiting.append(group)
        return sequences

    def finish(self) -> Iterator[list[TrainingSequence]]:
        """The batch is complete: the sequences that had to wait for that, group by group. Exhaust it."""
        by_batch = self._centered is not None and self._centered.standardize == "batch"
        if not self._waiting and not by_batch:
            return
        rewards = [self._rewards(group) for group in self._groups]
        self._scale = self._advantage_scale(rewards)
        if not self._waiting:
            return
        advantages = self._advantage(rewards, min_members=self._min_members)
        waiting = {id(group) for group in self._waiting}
        for group, group_advantages in zip(self._groups, advantages, strict=True):
            if id(group) in waiting:
                # What is divided out globally must not be in these already.
                yield self._sequences(group, [advantage * self._scale for advantage in group_advantages])

    def record(self, result: ChunkResult) -> None:
        """Add up what a forward-backward pass reported."""
        self._tokens += result.tokens
        self._sums.update(dict(result.sums))

    @property
    def has_gradient(self) -> bool:
        """True if some trained token has an advantage."""
        return self._tokens > 0

    @property
    def divisor(self) -> float:
        """What the accumulated gradient is divided by, once, before the optimizer step."""
        return self._divisor.value * self._scale

    def losses(self) -> Mapping[str, float]:
        """``loss`` over the divisor, everything else over the trained tokens."""
        tokens = max(1, self._tokens)
        return {key: value / (self.divisor if key == "loss" else tokens) for key, value in self._sums.items()}

    @property
    def wasted_tokens(self) -> int:
        """Generated tokens of the batch that no gradient can reach, those of failed members left out."""
        return self._wasted

    def metrics(self) -> Mapping[str, float]:
        """Of the finished batch. Tokens are active if they are trained, whatever their advantage."""
        return {
            "reward/zero_variance_group_frac": self._silent / max(1, len(self._groups)),
            "train/active_groups": float(len(self._active_groups)),
            "train/active_sequences": float(self._divisor.trajectories),
            "train/active_tokens": float(self._divisor.tokens),
            "train/gradient_scale": 1.0 / self.divisor,
        }

    def _advantage_scale(self, rewards: Rewards) -> float:
        if self._centered is None or self._centered.standardize != "batch":
            return 1.0
        plain = GroupCentered(eps=self._centered.eps)(rewards, min_members=self._min_members)
        return self._centered.batch_scale(rewards, plain)

    def _drop_truncated(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for member in group.members_G:
                if member.truncated is not None and self._truncation.policy(member.truncated).startswith("drop"):
                    member.dropped = DropReason.TRUNCATED

    def _rewards(self, group: Group) -> list[float | None]:
        return [self._reward(member) for member in group.members_G]

    def _reward(self, member: Trajectory) -> float | None:
        if member.reward is None or member.truncated is None:
            return member.reward
        rule = self._truncation.policy(member.truncated)
        if rule == "drop_and_exclude_from_baseline":
            return None
        return 0.0 if rule == "zero_reward" else member.reward

    def _sequences(self, group: Group, advantages: Sequence[float]) -> list[TrainingSequence]:
        trained_G = [self._trained(member) for member in group.members_G]
        tokens_G = [sum([stop - start for start, stop, _, _ in trained]) for trained in trained_G]
        group_tokens = sum(tokens_G)
        self._divisor.add(tokens_G)
        self._silent += not any(advantages)
        if group_tokens:
            self._active_groups.add(group.index)
        for member, tokens in zip(group.members_G, tokens_G, strict=True):
            if member.dropped is not DropReason.FAILED:
                self._wasted += member.generated_tokens - tokens
        return [
            self._sequence(
                member,
                trained,
                advantage,
                token_weight(self._normalize, tokens=tokens, group_tokens=group_tokens),
            )
            for member, trained, advantage, tokens in zip(group.members_G, trained_G, advantages, tokens_G, strict=True)
            if tokens and advantage != 0.0
        ]

    def _sequence(
        self, member: Trajectory, trained: Sequence[_Placed], advantage: float, weight: float
    ) -> TrainingSequence:
        # What follows the last trained token conditions nothing that is trained.
        _, end, _, _ = trained[-1]
        mask = np.zeros(end, dtype=np.bool_)
        logprobs = np.zeros(end, dtype=np.float32)
        ages = np.zeros(end, dtype=np.int32)
        for start, stop, version, span in trained:
            mask[start:stop] = True
            logprobs[start:stop] = span.logprobs
            ages[start:stop] = self._version - version
        return TrainingSequence(
            tokens=member.tokens()[:end],
            logprobs=logprobs,
            mask=mask,
            ages=ages,
            advantage=advantage,
            weight=weight,
            temperature=self._temperature,
        )

    def _trained(self, member: Trajectory) -> list[_Placed]:
        """The spans that are trained; none of a member that is not."""
        trained: list[_Placed] = []
        if member.is_trained:
            start = 0
            for span in member.spans:
                stop = start + len(span.tokens)
                # Nothing but a generated span has a version.
                if span.version is not None and self._oldest <= span.version <= self._version:
                    trained.append((start, stop, span.version, span))
                elif span.kind is SpanKind.GENERATED:
                    self._require_masked(span, member)
                start = stop
        return trained

    def _require_masked(self, span: Span, member: Trajectory) -> None:
        """A generated span is not trained: raise if that is not because such old ones are masked."""
        if span.version is None:
            raise StalenessError(f"trajectory {member.id} has a generated span without a version")
        if not 0 <= span.version <= self._version:
            raise StalenessError(
                f"trajectory {member.id} has a segment of version {span.version}, which was not made yet: the run is "
                f"at version {self._version}"
            )
        if not self._stale_rule.masked:
            raise StalenessError(
                f"trajectory {member.id} has a segment of version {span.version}, which would be trained at version "
                f"{self._version} with max_staleness {self._max_staleness}"
            )
