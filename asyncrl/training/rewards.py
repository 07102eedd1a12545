"""The reward that a trajectory is trained with, which is not always the one that is logged."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.learning.overlong import OverlongPenalty
from asyncrl.scheduling.rules import Truncation
from asyncrl.types import Trajectory

__all__ = ["TrainingReward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReward:
    """What the rules about truncation and length make of a reward."""

    truncation: Truncation = field(default_factory=Truncation)
    overlong: OverlongPenalty | None = None

    def drops(self, member: Trajectory) -> bool:
        """True if a truncated member is not trained."""
        return member.truncated is not None and self.truncation.policy(member.truncated).startswith("drop")

    def of(self, member: Trajectory) -> float | None:
        """The member's reward; None if it has none, or is in no baseline."""
        reward = self._truncated(member)
        if reward is None or self.overlong is None:
            return reward
        return reward + self.overlong.of(member.generated_tokens)

    def _truncated(self, member: Trajectory) -> float | None:
        if member.reward is None or member.truncated is None:
            return member.reward
        rule = self.truncation.policy(member.truncated)
        if rule == "drop_and_exclude_from_baseline":
            return None
        return 0.0 if rule == "zero_reward" else member.reward
