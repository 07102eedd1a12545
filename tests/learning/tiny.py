"""Random data for a tiny model, and what it should give by a computation as plain as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.learning.base import OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import CISPO
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.torch_model import TorchModel
from asyncrl.types import IntArray

__all__ = [
    "CLOSE",
    "GRADIENTS_CLOSE",
    "LORA",
    "adam_settings",
    "full_logprobs",
    "gradients_of",
    "ids",
    "largest_difference",
    "load",
    "parameters_of",
    "random_sequences",
    "reference_model",
    "sequence_of",
    "train_step",
]

LORA = LoraConfig(r=4, alpha=8)

CLOSE = 1e-4
"""How far right float32 log-probabilities of the tiny model may be apart: each is off by up to 4e-6 against float64,
more or less on another processor or with other threads. What is wrong shows at 0.01 and more.
"""

GRADIENTS_CLOSE = 1e-3
"""The same for the undivided gradients of ``random_sequences``, which reach 39: off by up to 4e-5 against float64."""


def load(path: Path, **options: Any) -> TorchModel:
    """A learner's compute on the CPU with plain options."""
    defaults: dict[str, Any] = {
        "lora": None,
        "dtype": "float32",
        "device": "cpu",
        "threads": None,
        "micro_batch_tokens": 4096,
        "gradient_checkpointing": False,
        "seed": 0,
    }
    return TorchModel(path, **{**defaults, **options})


def reference_model(path: Path) -> Any:
    """The model as transformers alone loads it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def adam_settings(lr: float = 1e-2, **changes: float) -> OptimizerSettings:
    """One step of Adam."""
    values: dict[str, Any] = {
        "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": None, **changes
    }  # fmt: skip
    return OptimizerSettings(lr=lr, **values)


def ids(*tokens: int) -> IntArray:
    """(T,) tokens."""
    return np.array(tokens, dtype=np.int32)


def random_sequences(seed: int, count: int = 6, *, weight: float = 1.0) -> list[TrainingSequence]:
    """Random lengths, masks, advantages and temperatures; what is not trained has an unusable log-probability."""
    chance = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        length = int(chance.integers(3, 14))
        mask = chance.random(length) < 0.6
        mask[0], mask[-1] = False, True
        sequences.append(
            TrainingSequence(
                tokens=chance.integers(0, 32, length).astype(np.int32),
                logprobs=np.where(mask, chance.normal(-3, 0.5, length), -np.inf).astype(np.float32),
                mask=mask,
                ages=np.zeros(length, dtype=np.int32),
                advantage=float(chance.normal()),
                weight=weight,
                temperature=float(chance.choice([0.6, 1.0, 1.3])),
            )
        )
    return sequences


def sequence_of(
    text: str, *, trained: Sequence[int] | None = None, advantage: float = 1.0, temperature: float = 1.0
) -> TrainingSequence:
    """A token for each character of ``text``; all but the first are trained, or those at ``trained``."""
    mask = np.zeros(len(text), dtype=np.bool_)
    mask[list(range(1, len(text)) if trained is None else trained)] = True
    return TrainingSequence(
        tokens=np.array([ord(character) for character in text], dtype=np.int32),
        logprobs=np.zeros(len(text), dtype=np.float32),
        mask=mask,
        ages=np.zeros(len(mask), dtype=np.int32),
        advantage=advantage,
        weight=1.0,
        temperature=temperature,
    )


def full_logprobs(reference: Any, sequence: TrainingSequence) -> torch.Tensor:
    """(T - 1,) log-probabilities from all logits of one sequence, without padding."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    logits = reference(input_ids=tokens[None]).logits[0, :-1] / sequence.temperature
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return logprobs


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Name -> gradient, of the parameters that have one."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def largest_difference(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """Between tensors of the same names."""
    assert left.keys() == right.keys()
    assert left
    return max(float((left[name] - right[name]).detach().abs().max()) for name in left)


def parameters_of(model: TorchModel) -> dict[str, torch.Tensor]:
    """Name -> a copy of each parameter."""
    return {name: parameter.detach().clone() for name, parameter in model._causal.named_parameters()}


def train_step(model: TorchModel, sequences: Sequence[TrainingSequence]) -> None:
    """One pass and one step of Adam."""
    model.forward_backward(sequences, CISPO())
    model.optimizer_step(adam_settings(), 10.0)
