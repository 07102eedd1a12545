"""What the sum of the loss over the tokens of a step is divided by.

The divisor has a part that is known for each trajectory at once, its tokens' weight, and one that is known only when
the batch is complete. So chunks can be trained early, and the global part is divided out once, before the optimizer
step. With T tokens of a trajectory that are trained, zero advantages included, and trajectories with T = 0 not counted:

    normalize   weight of each token        divisor of the step
    token       1                           sum of T
    sequence    1 / T                       number of trajectories
    prompt      1 / (sum of T in its group) number of groups
    batch       1                           number of trajectories
    sum         1                           1

Tokens of trajectories whose group has no variance count: a batch without signal makes a smaller step, not a noisier
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

__all__ = ["Divisor", "Normalize", "token_weight"]

Normalize: TypeAlias = Literal["token", "sequence", "prompt", "batch", "sum"]


def token_weight(mode: Normalize, *, tokens: int, group_tokens: int) -> float:
    """Weight of each trained token of a trajectory with ``tokens`` in a group with ``group_tokens``, both positive."""
    if mode == "sequence":
        return 1.0 / tokens
    if mode == "prompt":
        return 1.0 / group_tokens
    return 1.0


class Divisor:
    """Owns the global part of the divisor while the groups of a step come in, in any order.

    Example: groups with token counts (10, 30) and (20, 20) have the divisor 80 by token, 4 by sequence, 2 by prompt.
    """

    def __init__(self, mode: Normalize) -> None:
        self._mode = mode
        self.tokens = 0
        """Trained tokens so far."""
        self.trajectories = 0
        """Trajectories with at least one."""
        self._groups = 0

    def add(self, tokens_G: Sequence[int]) -> None:
        """Count a group by its members' trained tokens."""
        self.tokens += sum(tokens_G)
        self.trajectories += sum(tokens > 0 for tokens in tokens_G)
        self._groups += any(tokens > 0 for tokens in tokens_G)

    @property
    def value(self) -> float:
        """The divisor; at least 1, so that an empty batch divides nothing by zero."""
        counts = {
            "token": self.tokens,
            "sequence": self.trajectories,
            "batch": self.trajectories,
            "prompt": self._groups,
            "sum": 1,
        }
        return float(max(1, counts[self._mode]))
