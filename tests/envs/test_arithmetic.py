"""The sums."""

from __future__ import annotations

import pytest

from asyncrl.types import Trajectory, TruncationCause
from envs.arithmetic.env import Addition, heldout_rows, train_rows


def test_no_heldout_sum_is_trained_on_in_either_order() -> None:
    """All 81 sums are on one of two sides, and mirror images are on the same one."""
    train = {(row["a"], row["b"]) for row in train_rows()}
    heldout = {(row["a"], row["b"]) for row in heldout_rows()}
    assert len(train) + len(heldout) == 81
    assert not heldout & train
    assert not heldout & {(b, a) for a, b in train}


@pytest.mark.parametrize(("answer", "reward"), [("9", 1.0), ("9\n", 1.0), ("8", 0.1), ("x", 0.0), ("9 or 8", 0.0)])
async def test_reward(answer: str, reward: float) -> None:
    """The first line is the sum, another number, or nothing."""
    env = Addition()
    traj = Trajectory(id="t", group=0, member=0, row=None, seed=0)
    traj.messages = [{"role": "assistant", "content": answer}]
    row = {"a": 4, "b": 5}
    assert await env.reward(traj, row) == reward
    assert await env.on_truncated(traj, row, TruncationCause.GENERATED_TOKENS) == reward
