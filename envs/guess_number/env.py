"""Guess a number between 0 and 9 in five guesses. After each one a tool says whether the number is higher or lower.

    prompt      <start>
    model       <tool_call>{"name": "guess", "arguments": {"number": 4}}</tool_call>
    tool        higher
    model       <tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>
    tool        correct

A guess that the hints have ruled out ends the game. The model starts from random weights: 0.1 million parameters and a
vocabulary in which each of the ten calls is one token, so that what it has to learn is the game and not JSON.

Reward: 1 minus 0.1 for each guess before the right one; without a right one, 0.1 for each guess that the hints allowed.
Guessing at random earns 0.37 on average, guessing at random what the hints allow 0.76, and halving 0.81.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import anyio

import asyncrl as rl
from asyncrl.types import Message, Row

GUESSES = 5


class GuessNumber(rl.Env):
    """One game. ``tool_latency``: mean seconds that the tool takes; most calls are quick, some are ten times slower."""

    recovery = "snapshot"

    def __init__(self, tool_latency: float = 0.0) -> None:
        self._latency_s = tool_latency
        self._random = random.Random()
        self._number = 0
        self._allowed = range(10)
        self._right = False
        self._ruled_out = False

    async def reset(self, row: Row) -> list[Message]:
        """A new game: ``row`` has the number and the seed of the tool's latency."""
        self._number = row["number"]
        self._random.seed(row["seed"])
        return [{"role": "user", "content": "<start>"}]

    @rl.tool
    async def guess(self, number: int) -> str:
        """Compare a guess with the number."""
        if self._latency_s:
            # Pareto with shape 2.5: half of the calls take less than 0.79 of the mean, one in 1,700 over 12 times it.
            await anyio.sleep(self._latency_s * self._random.paretovariate(2.5) * 0.6)
        self._right = number == self._number
        self._ruled_out = number not in self._allowed
        if number < self._number:
            self._allowed = range(max(number + 1, self._allowed.start), self._allowed.stop)
            return "higher"
        self._allowed = range(self._allowed.start, min(number, self._allowed.stop))
        return "correct" if self._right else "lower"

    async def on_turn(self, traj: rl.Trajectory) -> list[Message] | rl.TurnResult | None:
        """Run the guess; the game ends when it is right, ruled out, the last one, or no guess at all."""
        messages = await super().on_turn(traj)
        return None if self._right or self._ruled_out or traj.turns == GUESSES else messages

    async def reward(self, traj: rl.Trajectory, row: Row) -> float:
        """Early is better; without a win, what counts is how long the model listened to the hints."""
        guesses = int(traj.metrics.get("tool_calls", 0))
        traj.metrics["won"] = float(self._right)
        return 1.0 - 0.1 * (guesses - 1) if self._right else 0.1 * (guesses - self._ruled_out)

    async def snapshot(self, traj: rl.Trajectory) -> list[int]:
        """What the guesses so far have told."""
        return [self._allowed.start, self._allowed.stop, self._right, self._ruled_out]

    async def restore(self, traj: rl.Trajectory, state: list[int]) -> None:
        """The same game after a stop of the run."""
        await self.reset(traj.row)
        start, stop, right, ruled_out = state
        self._allowed, self._right, self._ruled_out = range(start, stop), bool(right), bool(ruled_out)


def train_rows() -> list[Row]:
    """Each number once in every ten rows, in an order that changes: a batch of ten groups has them all."""
    draw = random.Random(0)
    numbers = [number for _ in range(100) for number in draw.sample(range(10), 10)]
    return [{"number": number, "seed": i} for i, number in enumerate(numbers)]


def build_model(directory: Path) -> None:
    """Write a randomly initialised Qwen3 of 0.1 million parameters and its tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    calls = [f"<tool_call>{json.dumps({'name': 'guess', 'arguments': {'number': i}})}</tool_call>" for i in range(10)]
    words = ["<pad>", "<end>", "<start>", "higher", "lower", "correct", "?", *calls]
    words += [f"<unused{i}>" for i in range(32 - len(words))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<tool_call>.*?</tool_call>|<\w+>|\w+"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.05,  # a model this small would take most of the run to leave the usual 0.02
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
