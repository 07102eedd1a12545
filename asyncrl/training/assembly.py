"""From the groups of a step to training sequences: rewards, advantages, weights, masks, and the step's one divisor.

Chunks can be trained before the batch is complete. Whatever factor needs the whole batch (the divisor of
``normalize``, a batch-wide standard deviation) is kept out of the sequences and divided once at the optimizer step,
so the gradient does not depend on how the batch was cut or in which order its groups came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from asyncrl.errors import ConfigError, StalenessError
from asyncrl.learning.advantages import Advantage, Rewards, group_by_group
from asyncrl.learning.base import TrainingSequence, Update
from asyncrl.learning.losses import Divisor, Normalize, token_weight
from asyncrl.scheduling.rules import STALE_RULES, StalePolicy
from asyncrl.training.rewards import TrainingReward
from asyncrl.types import DropReason, Group, Span, SpanKind, Trajectory

__all__ = ["StepAssembly"]

_Placed: TypeAlias = tuple[int, int, int, Span]
"""Tokens ``start <= i < stop`` of a conversation are of this version and span."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """What is trained of a group."""

    sequences: list[TrainingSequence]
    tokens_G: list[int]
    oldest: int | None
    """The oldest version of its trained tokens; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scored:
    """A group with its advantages, and what is trained of it at the step's start."""

    group: Group
    advantages: Sequence[float]
    part: _Part


class StepAssembly:
    """Adds up one trainer step: ``add`` its chunks, ``finish`` once, then read ``divisor``, or make its ``updates``.

    ``version`` is committed when the step starts. ``stale_policy`` decides about spans older than ``max_staleness``;
    where the barrier should have kept them away, they raise ``StalenessError``.
    """

    def __init__(
        self,
        *,
        advantage: Advantage,
        normalize: Normalize,
        reward: TrainingReward,
        min_members: int,
        temperature: float,
        version: int,
        max_staleness: int,
        stale_policy: StalePolicy,
    ) -> None:
        self._advantage = advantage
        self._groupwise = group_by_group(advantage)
        # None: the advantage is asked for the whole batch.
        self._normalize = normalize
        self._reward = reward
        self._min_members = min_members
        self._temperature = temperature
        self._version = version
        self._max_staleness = max_staleness
        self._stale_rule = STALE_RULES[stale_policy]
        self._groups: list[Group] = []
        # Those of them whose advantages need the rewards of the whole batch.
        self._waiting: list[Group] = []
        self._divisor = Divisor(normalize)
        self._active_groups: set[int] = set()
        self._scale = 1.0
        # What all advantages of the batch are divided by.
        self._silent = 0
        self._wasted = 0
        self._scored: list[_Scored] = []

    def add(self, groups: Sequence[Group]) -> list[TrainingSequence]:
        """The sequences of a chunk that can be trained before the batch is complete."""
        self._groups += groups
        self._drop_truncated(groups)
        sequences: list[TrainingSequence] = []
        for group in groups:
            rewards = self._rewards(group)
            present = [reward for reward in rewards if reward is not None]
            if self._groupwise is not None and len(present) >= self._min_members:
                sequences += self._enter(group, self._groupwise.center(rewards, baseline=present))
            else:
                self._waiting.append(group)
        return sequences

    def finish(self) -> Iterator[list[TrainingSequence]]:
        """The batch is complete: the sequences that had to wait for that, group by group. Exhaust it."""
        rewards = [self._rewards(group) for group in self._groups]
        self._scale = self._advantage_scale(rewards)
        if not self._waiting:
            return
        advantages = self._advantage(rewards, min_members=self._min_members)
        _require_same_shape(rewards, advantages)
        waiting = {id(group) for group in self._waiting}
        for group, group_advantages in zip(self._groups, advantages, strict=True):
            if id(group) in waiting:
                # What is divided out globally must not be in these already.
                yield self._enter(group, [advantage * self._scale for advantage in group_advantages])

    @property
    def groups(self) -> int:
        """Groups, or parts of groups, that were added."""
        return len(self._groups)

    def updates(self, parts: Iterable[Sequence[int]]) -> Iterator[Update]:
        """After ``finish``: one update for each of ``parts``, which are positions of groups, without its settings.

        The version grows with each update, and with it the age of every token: what is too old by then is masked, or
        raises. Each has a divisor of its own. Parts without a gradient make no update and no version.
        """
        version = self._version
        for chosen in parts:
            divisor, sequences = Divisor(self._normalize), list[TrainingSequence]()
            for scored in (self._scored[position] for position in chosen):
                part = scored.part
                if part.oldest is not None and part.oldest < self._oldest(version):
                    part = self._part(scored.group, scored.advantages, version)
                divisor.add(part.tokens_G)
                sequences += part.sequences
            if sequences:
                version += 1
                yield Update(chunks=[sequences], divisor=divisor.value * self._scale)

    @property
    def divisor(self) -> float:
        """What the accumulated gradient is divided by, once, before the optimizer step."""
        return self._divisor.value * self._scale

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
        if self._groupwise is None:
            return 1.0
        return self._groupwise.batch_scale(rewards, self._groupwise.centered(rewards, min_members=self._min_members))

    def _drop_truncated(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for member in group.members_G:
                if self._reward.drops(member):
                    member.dropped = DropReason.TRUNCATED

    def _rewards(self, group: Group) -> list[float | None]:
        return [self._reward.of(member) for member in group.members_G]

    def _enter(self, group: Group, advantages: Sequence[float]) -> list[TrainingSequence]:
        """The sequences of a group whose advantages are known; from now on it counts."""
        part = self._part(group, advantages, self._version)
        self._scored.append(_Scored(group=group, advantages=advantages, part=part))
        self._divisor.add(part.tokens_G)
        self._silent += not any(advantages)
        if any(part.tokens_G):
            self._active_groups.add(group.index)
        for member, tokens in zip(group.members_G, part.tokens_G, strict=True):
            if member.dropped is not DropReason.FAILED:
                self._wasted += member.generated_tokens - tokens
        return part.sequences

    def _part(self, group: Group, advantages: Sequence[float], version: int) -> _Part:
        """What is trained of ``group`` while ``version`` is committed."""
        trained_G = [self._trained(member, version) for member in group.members_G]
        tokens_G = [sum([stop - start for start, stop, _, _ in trained]) for trained in trained_G]
        group_tokens = sum(tokens_G)
        oldest = min((old for trained in trained_G for _, _, old, _ in trained), default=None)
        sequences = [
            self._sequence(
                member,
                trained,
                advantage,
                token_weight(self._normalize, tokens=tokens, group_tokens=group_tokens),
            )
            for member, trained, advantage, tokens in zip(group.members_G, trained_G, advantages, tokens_G, strict=True)
            if tokens and advantage != 0.0
        ]
        return _Part(sequences=sequences, tokens_G=tokens_G, oldest=oldest)

    def _sequence(
        self, member: Trajectory, trained: Sequence[_Placed], advantage: float, weight: float
    ) -> TrainingSequence:
        # What follows the last trained token conditions nothing that is trained.
        _, end, _, _ = trained[-1]
        mask = np.zeros(end, dtype=np.bool_)
        logprobs = np.zeros(end, dtype=np.float32)
        ages = np.zeros(end, dtype=np.int32)
        for start, stop, sampled, span in trained:
            mask[start:stop] = True
            logprobs[start:stop] = span.logprobs
            ages[start:stop] = self._version - sampled
        return TrainingSequence(
            tokens=member.tokens()[:end],
            logprobs=logprobs,
            mask=mask,
            ages=ages,
            advantage=advantage,
            weight=weight,
            temperature=self._temperature,
        )

    def _oldest(self, version: int) -> int:
        """The oldest version of a token that is trained while ``version`` is committed."""
        return 0 if self._stale_rule.unbounded else max(0, version - self._max_staleness)

    def _trained(self, member: Trajectory, version: int) -> list[_Placed]:
        """The spans that are trained while ``version`` is committed; none of a member that is not."""
        oldest = self._oldest(version)
        trained: list[_Placed] = []
        if member.is_trained:
            start = 0
            for span in member.spans:
                stop = start + len(span.tokens)
                # Nothing but a generated span has a version.
                if span.version is not None and oldest <= span.version <= self._version:
                    trained.append((start, stop, span.version, span))
                elif span.kind is SpanKind.GENERATED:
                    self._require_masked(span, member, version)
                start = stop
        return trained

    def _require_masked(self, span: Span, member: Trajectory, version: int) -> None:
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
                f"{version} with max_staleness {self._max_staleness}"
            )


def _require_same_shape(rewards: Rewards, advantages: Sequence[Sequence[float]]) -> None:
    wanted, found = ([len(group) for group in groups] for groups in (rewards, advantages))
    if found != wanted:
        raise ConfigError.for_value("the members of each group in advantage(..)", found, f"those of rewards: {wanted}")
