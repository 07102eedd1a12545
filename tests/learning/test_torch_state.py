"""A learner that goes on in another process takes the same steps to the last bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.checkpoint.journal import Journal
from asyncrl.checkpoint.state import Consumed, JournalEntry
from asyncrl.checkpoint.weights import SavedWeights
from asyncrl.errors import CheckpointError
from asyncrl.learning.base import Update, distinct_sequences
from asyncrl.learning.losses import CISPO, DecoupledPPO
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.torch_learner import TorchLearner
from asyncrl.learning.torch_model import TorchModel
from tests.learning.tiny import LORA, adam_settings, load, parameters_of, random_sequences, train_step

KINDS: list[dict[str, Any]] = [{}, {"lora": LORA}, {"dtype": "bfloat16"}, {"lora": LORA, "dtype": "bfloat16"}]
NAMES = ["full", "lora", "full-bfloat16", "lora-bfloat16"]


def _equal(left: TorchModel, right: TorchModel) -> bool:
    ours, theirs = parameters_of(left), parameters_of(right)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("options", KINDS, ids=NAMES)
def test_the_steps_after_a_load_give_the_same_bits(model_path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Parameters, both moments and the count of steps; also where the optimizer works on float32 copies."""
    whole = load(model_path, **options)
    for seed in range(3):
        train_step(whole, random_sequences(seed))
    whole.save_state(tmp_path)
    resumed = load(model_path, **{**options, "seed": 9})
    assert not _equal(resumed, whole)
    resumed.load_state(tmp_path)
    assert _equal(resumed, whole)
    for seed in range(3, 5):
        train_step(whole, random_sequences(seed))
        train_step(resumed, random_sequences(seed))
    assert _equal(resumed, whole)


def test_a_state_without_a_step_has_parameters_only(model_path: Path, tmp_path: Path) -> None:
    """A fresh adapter is saved too, for its values are random."""
    fresh = load(model_path, lora=LORA)
    fresh.save_state(tmp_path)
    other = load(model_path, lora=LORA, seed=5)
    other.load_state(tmp_path)
    assert _equal(fresh, other)
    for model in (fresh, other):
        train_step(model, random_sequences(0))
    assert _equal(fresh, other)


def test_a_state_of_another_adapter_is_refused(model_path: Path, tmp_path: Path) -> None:
    """By the name of the tensor and both shapes; nothing is changed by then."""
    load(model_path, lora=LORA).save_state(tmp_path)
    other = load(model_path, lora=LoraConfig(r=2, alpha=8))
    before = parameters_of(other)
    with pytest.raises(CheckpointError, match=r"lora_A.* of shape \(4, .*\), but the model has it of shape \(2, "):
        other.load_state(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in parameters_of(other).items())


def _flipped(share: float, data: bytes) -> bytes:
    place = int(share * (len(data) - 1))
    return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + data[-8:],
    **{f"a bit at {share} of it": partial(_flipped, share) for share in (0.0, 0.01, 0.3, 0.6, 0.9, 1.0)},
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_weights_are_never_loaded(model_path: Path, tmp_path: Path, damage: str) -> None:
    """A flipped bit in a tensor is a number like any other: only the seal of the folder tells."""
    learner = TorchLearner(model_path, device="cpu", lora=LORA)
    await learner.open()
    weights = SavedWeights(tmp_path)
    await learner.save_state(weights.draft(4))
    weights.commit(n=4, version=4, run="")
    await learner.close()
    assert weights.newest(4, []) == (4, 4, tmp_path / "v000004")
    for path in (tmp_path / "v000004").iterdir():
        content = path.read_bytes()
        path.write_bytes(DAMAGES[damage](content))
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            weights.newest(4, [])
        path.write_bytes(content)
    assert weights.newest(4, []) is not None


@pytest.mark.parametrize("damage", ["emptied", "cut"])
def test_a_state_that_cannot_be_read_is_named(model_path: Path, tmp_path: Path, damage: str) -> None:
    """Also where nobody has looked at the folder's seal before."""
    model = load(model_path, lora=LORA)
    model.save_state(tmp_path)
    path = tmp_path / "state.safetensors"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        model.load_state(tmp_path)


@pytest.mark.parametrize("options", [{}, {"lora": LORA}], ids=["full", "lora"])
@pytest.mark.parametrize("loss", [CISPO(), DecoupledPPO()], ids=["cispo", "decoupled"])
async def test_replaying_the_journal_gives_the_same_bits(
    model_path: Path, tmp_path: Path, options: dict[str, Any], loss: Any
) -> None:
    """What a step was made from goes to disk and back, update by update, and is trained again in another process."""
    journal = Journal(tmp_path, tmp_path / "refused")

    async def step(learner: TorchLearner, entry: JournalEntry) -> None:
        await learner.prepare_step(distinct_sequences(entry.updates), loss)
        for number, update in enumerate(entry.updates):
            for chunk in update.chunks:
                await learner.forward_backward(chunk, loss, updates=number)
            assert update.settings is not None
            await learner.optimizer_step(update.settings, divisor=update.divisor)
        await learner.end_step()

    whole, resumed = (TorchLearner(model_path, device="cpu", **options) for _ in range(2))
    await whole.open()
    for n in (1, 2, 3):
        early, late = random_sequences(n), random_sequences(n + 10)
        one = Consumed(group=n, members=(0, 1), final=True)
        settings = adam_settings()
        updates = [
            Update(chunks=[early, late], divisor=7.3, settings=settings),
            Update(chunks=[late], divisor=2.7, settings=settings),
        ]
        entry = JournalEntry(n=n, version=2 * n - 2, admitted=n, consumed=(one,), updates=updates)
        journal.draft(entry)
        await step(whole, entry)
        journal.commit(n)
    await resumed.open()
    for n in journal.steps():
        await step(resumed, journal.read(n))
    ours, theirs = await whole.weights(), await resumed.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for learner in (whole, resumed):
        await learner.close()
