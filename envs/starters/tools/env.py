"""The task: the model has to look up a price with a tool, and then to say it.

prompt      apple
model       <tool_call>{"name": "price", "arguments": {"item": "apple"}}</tool_call>
tool        3
model       3
"""

from __future__ import annotations

import asyncrl as rl


class Shop(rl.Env):
    """One shop for each conversation: what a tool keeps in ``self`` is seen by no other."""

    async def reset(self, row):
        """The messages that a conversation begins with. ``row`` is a line of rows.jsonl."""
        self.prices = {row["item"]: str(row["price"])}
        return [{"role": "user", "content": row["item"]}]

    @rl.tool(timeout=30.0)
    async def price(self, item: str) -> str:
        """Look up what an item costs."""
        if item not in self.prices:
            # What a tool raises is told to the model. What is not the model's fault is an rl.InfrastructureError:
            # the conversation is then tried again instead of being rewarded.
            raise ValueError(f"{item} is sold out")
        return self.prices[item]

    async def reward(self, traj, row):
        """How good the finished conversation was. What is compared are the rewards of answers to the same row."""
        called, failed = traj.metrics.get("tool_calls", 0), traj.metrics.get("tool_errors", 0)
        if called > failed and traj.final_text.strip() == str(row["price"]):
            return 1.0
        # A little for each part of the way: where all answers to a row earn the same, there is nothing to learn.
        return 0.3 if called > failed else 0.01 if called else 0.0
