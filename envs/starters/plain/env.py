"""The task: a number is asked for by its name, and the model has to write its digit.

prompt      seven
model       7
"""

from __future__ import annotations

import asyncrl as rl


class Digits(rl.Env):
    """One question, one answer. Every conversation gets an object of its own."""

    async def reset(self, row):
        """The messages that a conversation begins with. ``row`` is a line of rows.jsonl."""
        return [{"role": "user", "content": row["question"]}]

    async def reward(self, traj, row):
        """How good the finished conversation was. What is compared are the rewards of answers to the same row."""
        right = traj.final_text.strip() == row["answer"]
        traj.add_metric("digits", traj.final_text.strip().isdigit())  # shown beside the reward, and not trained on
        return 1.0 if right else 0.0
