"""How near to its GPU's limits does the learner come?

Random models of the shapes of Qwen3-0.6B and Qwen3-4B in bfloat16, all weights, a step on one sequence of 2,048, 16,384
and 65,536 tokens; and the loss head alone beside its three bare matrix products. MFU counts the operations that a pass
needs (6 for each weight and token, and those of causal attention), not what is computed again for checkpoints. It is
given over the 989 TFLOP/s that an H100 and an H200 are sold with, and over what one large product reaches here. Prints
one JSON line for each question, nothing else.

    uv run python -m benchmarks.gpu_learner --model 0.6B
    uv run python -m benchmarks.gpu_learner --device cpu --quick     # tiny sizes, to see that all of it works
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import asyncrl as rl
from asyncrl.learning.base import OptimizerSettings, TrainingSequence
from benchmarks.answer import Answer
from benchmarks.tokenizer import write_tokenizer

__all__ = ["Shape", "answers", "main", "operations"]

_PEAK_FLOPS = 989e12
_MFU, _HEAD_TIMES, _HEAD_GIB = 0.36, 1.7, 6.0
_GOAL = ("0.6B", 16_384)
# The size and length that the MFU has its goal for.
_CHECKPOINTED = 16_384
# Tokens from which on activations are computed twice, as other trainers do at these lengths.
_STEP = OptimizerSettings(lr=1e-6, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a Qwen3 with tied embeddings and heads of 128."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int = 151_936
    head_dim: int = 128


_SHAPES: Mapping[str, Shape] = {
    "0.6B": Shape(hidden=1024, intermediate=3072, layers=28, heads=16, key_value_heads=8),
    "4B": Shape(hidden=2560, intermediate=9728, layers=36, heads=32, key_value_heads=8),
}
_LENGTHS = (2_048, 16_384, 65_536)
_HEAD = (8192, 4096, 151_936)
# Rows, hidden size and vocabulary of the loss head alone.
_QUICK_SHAPES = {"tiny": Shape(hidden=64, intermediate=128, layers=2, heads=2, key_value_heads=1, vocabulary=512)}
_QUICK_LENGTHS, _QUICK_HEAD = (64, 128), (64, 32, 512)


def operations(shape: Shape, tokens: int) -> float:
    """Floating-point operations of a forward and backward pass over one sequence, each product once."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.key_value_heads)
    weights = shape.layers * (attention + 3 * shape.hidden * shape.intermediate) + shape.vocabulary * shape.hidden
    # Scores and values of causal attention are two products of half of tokens x tokens, forward; twice that backward.
    return 6.0 * weights * tokens + 6.0 * shape.layers * shape.heads * shape.head_dim * tokens**2


def answers(device: str, shapes: Mapping[str, Shape], lengths: tuple[int, ...], rounds: int) -> Iterator[Answer]:
    """Speed, MFU and memory of each model at each length."""
    import torch

    ceiling = _ceiling_flops(device, 8192 if device != "cpu" else 256)
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder:
            _write_model(Path(folder), shape, device)
            for tokens in lengths:
                try:
                    seconds, gib = _step_s(Path(folder), shape, device, tokens, rounds)
                except torch.OutOfMemoryError as error:
                    print(f"{name}, {tokens} tokens: {error}", file=sys.stderr)
                    continue
                yield from _step_answers(name, tokens, seconds, gib, (operations(shape, tokens), ceiling))


def _step_answers(name: str, tokens: int, seconds: float, gib: float, flops: tuple[float, float]) -> Iterator[Answer]:
    needed, ceiling = flops
    what = f"{name}, one sequence of {tokens} tokens, {gib:.3g} GiB at most, {tokens / seconds:.5g} tokens/s"
    for anchor, peak in (("989 TFLOP/s, dense bfloat16", _PEAK_FLOPS), ("a large product, measured here", ceiling)):
        has_goal = (name, tokens) == _GOAL and peak == _PEAK_FLOPS
        yield Answer(
            question=f"operations a second of a training step, {what}",
            figure=needed / seconds / 1e12,
            unit="TFLOP/s",
            anchor=anchor,
            anchor_figure=peak / 1e12,
            ratio=needed / seconds / peak,
            goal=f"ratio (MFU) at least {_MFU:g}" if has_goal else "none",
            meets_goal=not has_goal or needed / seconds >= _MFU * peak,
        )


def _write_model(folder: Path, shape: Shape, device: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder, shape.vocabulary)


def _step_s(folder: Path, shape: Shape, device: str, tokens: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a pass and an optimizer step, and the most GiB that tensors had."""
    learner = rl.TorchLearner(
        folder,
        dtype="bfloat16",
        device=device,
        micro_batch_tokens=tokens,
        gradient_checkpointing=tokens >= _CHECKPOINTED,
    )
    anyio.run(learner.open)
    sequence = _sequence(shape, tokens)
    loss = rl.CISPO()

    def step() -> None:
        anyio.run(learner.forward_backward, [sequence], loss)
        # Its gradient norm is a number on the CPU: the pass has ended by then.
        anyio.run(partial(learner.optimizer_step, _STEP, divisor=float(tokens)))

    try:
        step()
        _synchronize(device, reset_peak=True)
        return _median_s(step, device, rounds), _peak_gib(device)
    finally:
        anyio.run(learner.close)
        _empty(device)


def _sequence(shape: Shape, tokens: int) -> TrainingSequence:
    """All but its first token are trained."""
    draw = np.random.default_rng(0)
    mask = np.arange(tokens) > 0
    return TrainingSequence(
        tokens=draw.integers(2, shape.vocabulary, tokens, dtype=np.int32),
        logprobs=np.where(mask, -np.log(shape.vocabulary), 0).astype(np.float32),
        mask=mask,
        ages=np.zeros(tokens, dtype=np.int32),
        advantage=1.0,
        weight=1.0,
    )


def head_answers(device: str, sizes: tuple[int, int, int], rounds: int) -> Iterator[Answer]:
    """Time and memory of the loss head, forward and backward, beside the three products that it cannot do without."""
    import torch

    from asyncrl.learning.losshead import head_logprobs

    rows, hidden_size, vocabulary = sizes
    draw = _generator(device)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    hidden = torch.randn(rows, hidden_size, generator=draw, **options).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, generator=draw, **options) / hidden_size**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device=device, generator=draw)
    temperature = torch.ones(rows, device=device)

    def head() -> None:
        hidden.grad = weight.grad = None
        logprobs, _ = head_logprobs(hidden, weight, targets, temperature=temperature)
        logprobs.sum().backward()

    def products() -> None:
        logits = hidden.detach() @ weight.detach().T
        _ = logits @ weight.detach(), logits.T @ hidden.detach()

    products()
    bare_s = _median_s(products, device, rounds)
    head()
    hidden.grad = weight.grad = None
    _synchronize(device, reset_peak=True)
    before = _peak_gib(device)
    seconds = _median_s(head, device, rounds)
    gib = _peak_gib(device) - before
    yield Answer(
        question=f"loss head forward and backward, {rows} rows of {hidden_size}, V = {vocabulary}, {gib:.3g} GiB",
        figure=seconds * 1e3,
        unit="ms",
        anchor="its three bare products in bfloat16",
        anchor_figure=bare_s * 1e3,
        ratio=seconds / bare_s,
        goal=f"ratio at most {_HEAD_TIMES:g}, with at most {_HEAD_GIB:g} GiB besides weights and rows",
        meets_goal=seconds <= _HEAD_TIMES * bare_s and gib <= _HEAD_GIB,
    )


def _ceiling_flops(device: str, size: int) -> float:
    """Of the product of two square matrices."""
    import torch

    generator = _generator(device)
    one, other = (torch.randn(size, size, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2))
    torch.mm(one, other)
    return 2.0 * size**3 / _median_s(lambda: torch.mm(one, other), device, 10)


def _generator(device: str) -> Any:
    import torch

    return torch.Generator(device).manual_seed(0)


def _median_s(work: Callable[[], object], device: str, rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _synchronize(device: str, *, reset_peak: bool = False) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)
        if reset_peak:
            torch.cuda.reset_peak_memory_stats(device)


def _peak_gib(device: str) -> float:
    """Of a GPU's tensors; a CPU keeps no account of them."""
    import torch

    return float("nan") if device == "cpu" else torch.cuda.max_memory_allocated(device) / 2**30


def _empty(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.empty_cache()


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=_SHAPES, help="measure one model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("there is no GPU here, so nothing is measured; --device cpu --quick shows that it works", file=sys.stderr)
        return
    shapes = _SHAPES if options.model is None else {options.model: _SHAPES[options.model]}
    if options.quick:
        shapes = _QUICK_SHAPES
    lengths, head = (_QUICK_LENGTHS, _QUICK_HEAD) if options.quick else (_LENGTHS, _HEAD)
    for answer in head_answers(options.device, head, options.rounds):
        print(answer.line(), flush=True)
    for answer in answers(options.device, shapes, lengths, options.rounds):
        print(answer.line(), flush=True)


if __name__ == "__main__":
    main()
