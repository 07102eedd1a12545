"""Guess a number between 0 and 9 in five guesses. After each one a tool says whether the number is higher or lower.

    prompt      <start>
    model       <tool_call>{"name": "guess", "arguments": {"number": 4}}</tool_call>
    tool        higher
    model       <tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>
    tool        correct

The model starts from random weights: 0.1 million parameters and a vocabulary in which each of the ten calls is one
token, so that what it has to learn is the game and not JSON. Reward: 1 minus 0.1 for each guess before the right one;
0.04 for each guess if none was right. Without hints a player gets 0.41 by chance and 0.50 by never repeating; halving
always wins.
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

    def __init__(self, tool_latency: float = 0.0) -> None:
        self._latency_s = tool_latency
        self._number = 0
        self._won = False
        self._random = random.Random()

    @rl.tool
    async def guess(self, number: int) -> str:
        """Compare a guess with the number."""
        if self._latency_s:
            # Pareto with shape 2: half of the calls take less than 0.71 of the mean, one in a hundred over 5 times it.
            await anyio.sleep(self._latency_s * self._random.paretovariate(2) / 2)
        self._won = number == self._number
        return "correct" if self._won else "higher" if self._number > number else "lower"

    async def reset(self, row: Row) -> list[Message]:
        """A new game: ``row`` has the number and the seed of the tool's latency."""
        self._number = row["number"]
        self._random.seed(row["seed"])
        return [{"role": "user", "content": "<start>"}]

    async def on_turn(self, traj: rl.Trajectory) -> list[Message] | rl.TurnResult | None:
        """Run the guess; the game ends when it is right, when guesses are used up, or when it is no guess at all."""
        messages = await super().on_turn(traj)
        return None if self._won or traj.turns == GUESSES else messages

    async def reward(self, traj: rl.Trajectory, row: Row) -> float:
        """Early is better; a game without a win still earns a little for each real guess."""
        guesses = int(traj.metrics.get("tool_calls", 0))
        traj.metrics["won"] = float(self._won)
        return 1.0 - 0.1 * (guesses - 1) if self._won else 0.04 * guesses


def train_rows() -> list[Row]:
    """Each number equally often, in a shuffled order."""
    rows = [{"number": i % 10, "seed": i} for i in range(1000)]
    random.Random(0).shuffle(rows)
    return rows


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
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
