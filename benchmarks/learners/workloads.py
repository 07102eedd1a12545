"""What the learners train on: a small random Qwen3, and four kinds of sequences for it.

``uniform``: answers of one length to short prompts. ``heavy``: lognormal answers, p99 ten times p50. ``shared``:
prompts eight times as long as the answers. ``turns``: four turns with texts of a tool between them, and a second end
for each conversation, which was rewritten after two of its turns; a token is trained where it was sampled first. In all
of them eight sequences have a prompt in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.tokenizer import write_tokenizer

__all__ = ["FULL", "QUICK", "WORKLOADS", "Sample", "Size", "samples", "write_model"]

WORKLOADS = ("uniform", "heavy", "shared", "turns")
Parts: TypeAlias = list[tuple[npt.NDArray[np.int64], bool]]
"""Tokens, and whether they are trained."""
_FIRST_TOKEN = 2
# Before it are padding and the end of a text.


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the model and of what it trains on."""

    vocabulary: int
    hidden: int
    layers: int
    groups: int
    scale: int
    """The lengths below are divided by it."""


FULL = Size(vocabulary=32_768, hidden=256, layers=4, groups=4, scale=1)
QUICK = Size(vocabulary=512, hidden=64, layers=2, groups=2, scale=8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One sequence: a prompt, and after it what was sampled or came from tools."""

    tokens: npt.NDArray[np.int64]
    """(T,)"""
    prompt: int
    """Tokens of the prompt."""
    mask: npt.NDArray[np.bool_]
    """(T,) True for tokens that are trained."""
    logprobs: npt.NDArray[np.float32]
    """(T,) as if of the policy that sampled; 0 where ``mask`` is False."""
    advantage: float


def write_model(folder: Path, size: Size) -> None:
    """A random Qwen3 whose logits are about one standard deviation wide."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64 or 1,
        num_key_value_heads=size.hidden // 128 or 1,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    write_tokenizer(folder, size.vocabulary)


def samples(workload: str, size: Size) -> list[Sample]:
    """The sequences of a workload, group after group; always the same."""
    draw = np.random.default_rng(0)
    made: list[Sample] = []
    for _ in range(size.groups):
        if workload == "turns":
            made += _conversations(draw, size)
            continue
        prompt = _tokens(draw, size, 512 if workload == "shared" else 64)
        for _ in range(8):
            answer = _tokens(draw, size, _answer_tokens(workload, draw))
            made.append(_sample(draw, size, prompt, [(answer, True)]))
    return made


def _answer_tokens(workload: str, draw: np.random.Generator) -> int:
    if workload == "heavy":
        # The 99th percentile of a lognormal with sigma 1 is exp(2.33) = 10 times the 50th.
        return int(np.clip(draw.lognormal(np.log(48), 1.0), 4, 1024))
    return 64 if workload == "shared" else 128


def _conversations(draw: np.random.Generator, size: Size) -> list[Sample]:
    """Four conversations about one prompt, each with two ends."""
    prompt = _tokens(draw, size, 256)
    made = []
    for _ in range(4):
        begin = _turn(draw, size)
        begin.append((_tokens(draw, size, 48), True))
        trained_before = [(part, False) for part, _ in begin]
        for beginning in (begin, trained_before):
            tool = (_tokens(draw, size, 64), False)
            end = [*_turn(draw, size), (_tokens(draw, size, 48), True)]
            made.append(_sample(draw, size, prompt, [*beginning, tool, *end]))
    return made


def _turn(draw: np.random.Generator, size: Size) -> Parts:
    """What was sampled, and what a tool said to that."""
    return [(_tokens(draw, size, 48), True), (_tokens(draw, size, 64), False)]


def _tokens(draw: np.random.Generator, size: Size, count: int) -> npt.NDArray[np.int64]:
    return draw.integers(_FIRST_TOKEN, size.vocabulary, max(2, count // size.scale))


def _sample(draw: np.random.Generator, size: Size, prompt: npt.NDArray[np.int64], parts: Parts) -> Sample:
    tokens = np.concatenate([prompt, *(part for part, _ in parts)])
    trained = [np.full(len(part), is_trained) for part, is_trained in parts]
    mask = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), *trained])
    # Near to what a model with such logits says of a token drawn at random.
    logprobs = draw.normal(-np.log(size.vocabulary) - 0.5, 0.5, len(tokens)).astype(np.float32)
    return Sample(
        tokens=tokens,
        prompt=len(prompt),
        mask=mask,
        logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        advantage=float(draw.uniform(0.5, 1.5)),
    )
