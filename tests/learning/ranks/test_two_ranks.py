"""Two ranks of torchrun with FSDP2 on gloo, against one process. They are started once and load several models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch

from asyncrl.errors import LearnerError, NonFiniteError
from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.losses import DecoupledPPO, Loss
from asyncrl.learning.modelhost import ModelOptions
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.ranks.client import RanksHost, module_paths
from asyncrl.learning.ranks.launch import LocalRanks
from asyncrl.learning.torch_model import TorchModel
from tests.learning.ranks.badlosses import Raising, Watching
from tests.learning.tiny import LORA, adam_settings, load, random_sequences

pytestmark = pytest.mark.slow

CLOSE = 1e-6
STEP = adam_settings(1e-3, grad_clip_norm=1.0)


async def _off_loop(function: Any, *arguments: Any, **options: Any) -> Any:
    return await anyio.to_thread.run_sync(partial(function, *arguments, **options))


async def _step(ranks: RanksHost, one: TorchModel, sequences: Sequence[TrainingSequence], loss: Loss) -> None:
    """The same step on both sides, with the same sums, log-ratios and gradient norm."""
    for updates, part in enumerate((sequences[:1], sequences[1:])):
        if updates == 0:
            await ranks.call("prepare_step", sequences=sequences, loss=loss)
            await _off_loop(one.prepare_step, sequences, loss)
        theirs = await ranks.call("forward_backward", sequences=part, loss=loss, updates=updates)
        ours = await _off_loop(one.forward_backward, part, loss, updates)
        assert (theirs.tokens, theirs.input_tokens) == (ours.tokens, ours.input_tokens)
        assert theirs.sums == pytest.approx(ours.sums, rel=1e-5, abs=1e-4)
        np.testing.assert_allclose(theirs.log_ratios, ours.log_ratios, atol=1e-5)
    theirs = await ranks.call("optimizer_step", settings=STEP, divisor=10.0)
    ours = await _off_loop(one.optimizer_step, STEP, 10.0)
    assert theirs == pytest.approx(ours, rel=CLOSE)
    await ranks.call("end_step")
    one.end_step()


async def _same(ranks: RanksHost, one: TorchModel) -> None:
    theirs, ours = await ranks.call("weights"), one.weights()
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=CLOSE)


async def _folder(path: Path) -> Path:
    await anyio.Path(path).mkdir()
    return path


def _model(path: Path, lora: LoraConfig | None) -> ModelOptions:
    plain = {"dtype": "float32", "device": "cpu", "threads": 1, "micro_batch_tokens": 20, "seed": 0}
    return ModelOptions(
        path=path, adapter=None, options={"lora": lora, "gradient_checkpointing": lora is not None, **plain}
    )


async def _check(ranks: RanksHost, model: ModelOptions, tmp_path: Path) -> None:
    """Steps, states from two to one and back, and what is published; a gradient that is not finite is refused."""
    path, whole = model.path, model.options
    one = await _off_loop(load, path, **whole)
    await _same(ranks, one)
    for seed, loss in enumerate((Watching(), DecoupledPPO())):
        await _step(ranks, one, random_sequences(seed), loss)
    await _same(ranks, one)

    state = await _folder(tmp_path / "two")
    await ranks.call("save_state", directory=state)
    assert len(list(state.iterdir())) == 2
    alone = await _off_loop(load, path, **{**whole, "seed": 5})
    await _off_loop(alone.load_state, state)
    await _same(ranks, alone)
    await _step(ranks, alone, random_sequences(2), Watching())
    state = await _folder(tmp_path / "one")
    await _off_loop(alone.save_state, state)
    await _off_loop(one.load_state, state)
    await _step(ranks, one, random_sequences(3), Watching())
    await ranks.call("load_state", directory=state)
    await _same(ranks, alone)
    await _step(ranks, alone, random_sequences(3), Watching())

    exported, expected = await _folder(tmp_path / "exported"), await _folder(tmp_path / "expected")
    await ranks.call("export", directory=exported)
    await _off_loop(alone.export, expected)
    assert sorted(p.name for p in exported.iterdir()) == sorted(p.name for p in expected.iterdir())
    await _off_loop(alone.load_exported, exported)
    await _same(ranks, alone)
    await ranks.call("load_exported", directory=expected)
    tokens = np.array([3, 1, 4, 1, 5], dtype=np.int32)
    theirs = await ranks.call("logprobs", tokens=tokens, start=2, temperature=0.7)
    np.testing.assert_allclose(theirs, await _off_loop(alone.logprobs, tokens, 2, 0.7), atol=1e-5)

    poor = random_sequences(0)
    poor[2].advantage = float("nan")
    await ranks.call("forward_backward", sequences=poor, loss=Watching())
    with pytest.raises(NonFiniteError, match="gradient norm"):
        await ranks.call("optimizer_step", settings=STEP, divisor=1.0)
    await _same(ranks, alone)


async def test_two_ranks_do_what_one_process_does(model_path: Path, tmp_path: Path) -> None:
    """Of all weights and of an adapter, with one sequence for two ranks too; and a rank that fails says why."""
    ranks = RanksHost(_model(model_path, None), LocalRanks(ranks=2, timeout_s=120, threads=1))
    await ranks.open()
    try:
        await _check(ranks, _model(model_path, None), await _folder(tmp_path / "full"))
        adapted = _model(model_path, LORA)
        await ranks.call("open", options=adapted, paths=module_paths())
        await _check(ranks, adapted, await _folder(tmp_path / "lora"))
        with pytest.raises(LearnerError, match=r"rank 1: IndexError: a user's mistake"):
            await ranks.call("forward_backward", sequences=random_sequences(0), loss=Raising(rank=1))
        with pytest.raises(LearnerError, match="have ended"):
            await ranks.call("discard_gradients")
    finally:
        await ranks.close()
