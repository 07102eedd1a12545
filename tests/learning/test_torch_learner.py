from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learning.base import Learner, OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import DecoupledPPO, PolicyGradient
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.torch_learner import TorchLearner

TOKENS = np.array([3, 1, 4, 1, 5], dtype=np.int32)
SEQUENCE = TrainingSequence(
    tokens=TOKENS,
    logprobs=np.full(5, -3.0, dtype=np.float32),
    mask=np.array([False, False, True, True, True]),
    ages=np.zeros(5, dtype=np.int32),
    advantage=1.0,
    weight=1.0,
)
SETTINGS = OptimizerSettings(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0)


async def test_a_whole_step_through_the_protocol(model_path: Path, tmp_path: Path) -> None:
    """Open, prepare, train, step, score, export, close: the trained tokens become more probable."""
    learner: Learner = TorchLearner(model_path, lora=LoraConfig(r=4), threads=1)
    assert (learner.model_path, learner.lora_rank) == (model_path, 4)
    await learner.open()
    try:
        before = await learner.logprobs(TOKENS, start=2, temperature=1.0)
        await learner.prepare_step([SEQUENCE], DecoupledPPO())
        result = await learner.forward_backward([SEQUENCE], DecoupledPPO())
        assert (result.tokens, result.input_tokens, result.computed_tokens) == (3, 5, 4)
        np.testing.assert_allclose(result.log_ratios, before + 3.0, atol=1e-5)
        report = await learner.optimizer_step(SETTINGS, divisor=3.0)
        await learner.end_step()
        assert report["lr"] == 1e-2
        assert report["grad_norm"] > 0
        assert (await learner.logprobs(TOKENS, start=2, temperature=1.0)).sum() > before.sum()
        await learner.export(tmp_path)
        assert (tmp_path / "adapter_config.json").is_file()
    finally:
        await learner.close()


async def test_discarded_gradients_are_not_stepped(model_path: Path) -> None:
    """Nothing is left of a pass whose gradient was discarded."""
    learner = TorchLearner(model_path)
    assert learner.lora_rank is None
    await learner.open()
    try:
        before = await learner.logprobs(TOKENS, start=1, temperature=1.0)
        await learner.forward_backward([SEQUENCE], PolicyGradient())
        await learner.discard_gradients()
        assert (await learner.optimizer_step(SETTINGS, divisor=1.0))["grad_norm"] == 0.0
        np.testing.assert_array_equal(await learner.logprobs(TOKENS, start=1, temperature=1.0), before)
    finally:
        await learner.close()


async def test_a_learner_that_is_not_open_says_so(model_path: Path) -> None:
    """Before ``open`` and after ``close``."""
    learner = TorchLearner(model_path)
    with pytest.raises(LearnerError, match="not open"):
        await learner.discard_gradients()
    await learner.open()
    await learner.close()
    with pytest.raises(LearnerError, match="not open"):
        await learner.discard_gradients()


def test_wrong_options_are_refused_before_anything_is_loaded(model_path: Path, tmp_path: Path) -> None:
    """At construction, with the name of the option."""
    with pytest.raises(ConfigError, match=r"model is .*there is no folder"):
        TorchLearner(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"model\.dtype is 'int8'"):
        TorchLearner(model_path, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.threads is 0"):
        TorchLearner(model_path, threads=0)
    with pytest.raises(ConfigError, match=r"model\.micro_batch_tokens is 0"):
        TorchLearner(model_path, micro_batch_tokens=0)


def test_constructing_one_imports_no_torch(model_path: Path) -> None:
    """A recipe is checked in milliseconds, not after torch's import."""
    code = (
        "import sys; from asyncrl.learning.torch_learner import TorchLearner; "
        f"TorchLearner({str(model_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_closed_learner_can_be_opened_again(model_path: Path) -> None:
    """A later run starts from the folder's weights, not from where the earlier one ended."""
    learner = TorchLearner(model_path, threads=1)
    scores = []
    for _ in range(2):
        await learner.open()
        scores.append(await learner.logprobs(TOKENS, start=1, temperature=1.0))
        await learner.forward_backward([SEQUENCE], PolicyGradient())
        await learner.optimizer_step(SETTINGS, divisor=1.0)
        await learner.close()
    np.testing.assert_array_equal(scores[0], scores[1])
