"""What losses ask the model for before a step: the reference of a penalty, and a teacher of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.losses import (
    CISPO,
    Correction,
    DecoupledPPO,
    KLPenalty,
    LossInputs,
    LossOutput,
    ScoringModel,
    TokenData,
    compose,
)
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.torch_model import TorchModel
from tests.learning.tiny import (
    CLOSE,
    GRADIENTS_CLOSE,
    LORA,
    adam_settings,
    full_logprobs,
    gradients_of,
    largest_difference,
    load,
    random_sequences,
    reference_model,
)

MEASURED = compose(CISPO(), correction=None, kl=KLPenalty(coefficient=0.0, kind="k2"))


def _step(model: TorchModel, seed: int) -> Mapping[str, float]:
    sequences = random_sequences(seed)
    model.prepare_step(sequences, MEASURED)
    result = model.forward_backward(sequences, MEASURED)
    model.optimizer_step(adam_settings(0.05), 10.0)
    model.end_step()
    return {name: value / result.tokens for name, value in result.sums.items()}


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_reference_stays_where_training_began(model_path: Path, lora: LoraConfig | None) -> None:
    """At first the distance to it is 0; after two steps it is that of the untrained model's log-probabilities."""
    model = load(model_path, lora=lora)
    assert abs(_step(model, 0)["reference_kl"]) < CLOSE
    _step(model, 1)
    sequences = random_sequences(2)
    model.prepare_step(sequences, MEASURED)
    result = model.forward_backward(sequences, MEASURED)
    reference = reference_model(model_path)
    with torch.no_grad():
        first = np.concatenate([full_logprobs(reference, one)[one.mask[1:]].numpy() for one in sequences])
    now = result.log_ratios + np.concatenate([one.logprobs[one.mask] for one in sequences])
    expected = np.square(now - first).sum() / 2
    assert expected > 0.1
    assert result.sums["reference_kl"] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_penalty_on_no_distance_changes_nothing(model_path: Path, where: str) -> None:
    """The first step's gradient is that of the policy loss alone, and the correction's mask holds for both."""
    sequences = random_sequences(3)
    correction = Correction(token="mask", token_low=0.2, token_high=5.0)
    models = [load(model_path), load(model_path)]
    penalty = KLPenalty(coefficient=10.0, where=where)  # type: ignore[arg-type]
    for model, kl in zip(models, (penalty, None), strict=True):
        loss = compose(CISPO(), correction=correction, kl=kl)
        model.prepare_step(sequences, loss)
        sums = model.forward_backward(sequences, loss).sums
        assert sums["masked_frac"] > 0
    plain, penalised = (gradients_of(model._causal) for model in reversed(models))
    assert largest_difference(plain, penalised) < 10 * GRADIENTS_CLOSE


@dataclass(frozen=True)
class Teacher:
    """All that an algorithm with a teacher needs: its numbers, here by a rule, and a loss that reads them."""

    name: str = "teacher"

    def compute(self, model: ScoringModel, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        assert model.path.is_dir()
        return [torch.from_numpy(one.tokens[one.mask] / -10).float() for one in sequences]


@dataclass(frozen=True)
class Distillation:
    """-(teacher - sg(logp)) logp: the advantage of a token is what the teacher thinks of it."""

    token_data: tuple[TokenData, ...] = (Teacher(),)
    diagnostics: tuple[str, ...] = ("teacher",)

    def per_token(self, inputs: LossInputs) -> LossOutput:
        teacher = inputs.data["teacher"]
        advantages = teacher - inputs.logprobs.detach()
        return LossOutput(loss=-advantages * inputs.logprobs, diagnostics={"teacher": teacher})


def test_a_teacher_is_one_file(model_path: Path) -> None:
    """Its numbers arrive at their tokens, whatever pass a sequence comes in, and beside a reference."""
    model = load(model_path, micro_batch_tokens=30)
    sequences = random_sequences(4)
    loss = compose(Distillation(), correction=Correction(token="mask"), kl=KLPenalty(coefficient=0.1))
    model.prepare_step(sequences, loss)
    sums = model.forward_backward(sequences, compose(Distillation(), correction=None, kl=None)).sums
    expected = sum(float(one.tokens[one.mask].sum()) for one in sequences) / -10
    assert sums["teacher"] == pytest.approx(expected, rel=1e-4)
    assert {"teacher", "masked_frac", "reference_kl"} <= set(model.forward_backward(sequences, loss).sums)
    with pytest.raises(KeyError):
        model.forward_backward(sequences, DecoupledPPO())


@dataclass(frozen=True)
class _OneTooMany(Teacher):
    def compute(self, model: ScoringModel, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return [torch.zeros(int(one.mask.sum()) + 1) for one in sequences]


def test_numbers_of_another_length_are_refused(model_path: Path) -> None:
    """The error names the data and says how many there should be."""
    sequences = random_sequences(4, 1)
    tokens = int(sequences[0].mask.sum())
    with pytest.raises(ConfigError, match=rf"token data 'teacher' is \({tokens + 1},\), but must be \({tokens},\)"):
        load(model_path).prepare_step(sequences, Distillation(token_data=(_OneTooMany(),)))
