"""The learner in a process of its own, with a real one."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest

from asyncrl.errors import LearnerError, NonFiniteError
from asyncrl.learning.losses import CISPO, DecoupledPPO
from asyncrl.learning.torch_learner import TorchLearner
from tests.learning.ranks.badlosses import Killed, Raising
from tests.learning.tiny import LORA, adam_settings, random_sequences

pytestmark = pytest.mark.slow


async def _trained(learner: TorchLearner, directory: Path) -> bytes:
    """Two steps, and the state after them."""
    for seed in range(2):
        sequences = random_sequences(seed)
        await learner.prepare_step(sequences, DecoupledPPO())
        await learner.forward_backward(sequences, DecoupledPPO())
        await learner.optimizer_step(adam_settings(), divisor=10.0)
        await learner.end_step()
    await anyio.Path(directory).mkdir()
    await learner.save_state(directory)
    return await anyio.Path(directory / "state.safetensors").read_bytes()


async def test_a_process_does_what_a_thread_does_and_its_death_is_an_error(model_path: Path, tmp_path: Path) -> None:
    """The same bits; what a loss raises there is raised here, with its place; and one killed is an error, once."""
    thread, process = (TorchLearner(model_path, lora=LORA, threads=1, worker=kind) for kind in ("thread", "process"))
    await thread.open()
    await process.open()
    assert await _trained(thread, tmp_path / "thread") == await _trained(process, tmp_path / "process")
    ours, theirs = await thread.weights(), await process.weights()
    assert {name: value.tolist() for name, value in ours.items()} == {name: t.tolist() for name, t in theirs.items()}
    assert await thread.adapter_config() == await process.adapter_config()
    await thread.close()

    with pytest.raises(LearnerError, match="IndexError: a user's mistake") as raised:
        await process.forward_backward(random_sequences(0), Raising())
    assert "badlosses.py" in raised.value.__notes__[0]
    await process.discard_gradients()
    poor = random_sequences(0)
    for sequence in poor:
        sequence.advantage = float("nan")
    with pytest.raises(NonFiniteError, match="gradient norm"):
        await process.forward_backward(poor, CISPO())
        await process.optimizer_step(adam_settings(), divisor=1.0)
    tokens = np.array([3, 1, 4], dtype=np.int32)
    assert np.isfinite(await process.logprobs(tokens, start=1, temperature=1.0)).all()

    with pytest.raises(LearnerError, match="ranks have ended: the learner's process ended with exit code -9"):
        await process.forward_backward(random_sequences(0), Killed())
    with pytest.raises(LearnerError, match="ranks have ended"):
        await process.discard_gradients()
    await process.close()
