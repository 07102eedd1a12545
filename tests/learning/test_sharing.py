from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.losses import PolicyGradient
from asyncrl.learning.policymodule import PolicyModule
from asyncrl.learning.sharing import reason_not_to_share
from tests.learning.tiny import LORA, full_logprobs, gradients_of, largest_difference, load, reference_model

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def _sequence(tokens: Sequence[int], chance: np.random.Generator) -> TrainingSequence:
    mask = np.arange(len(tokens)) > chance.integers(len(tokens) - 1)
    return TrainingSequence(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.where(mask, -3.0, -np.inf).astype(np.float32),
        mask=mask,
        ages=np.zeros(len(tokens), dtype=np.int32),
        advantage=float(chance.normal()),
        weight=1.0,
        temperature=float(chance.choice([0.7, 1.0])),
    )


def _tree(seed: int) -> list[TrainingSequence]:
    """Sequences that leave each other at random places, some where another ends, some nowhere."""
    chance = np.random.default_rng(seed)
    paths = [chance.integers(32, size=int(chance.integers(2, 12))).tolist() for _ in range(2)]
    for _ in range(int(chance.integers(1, 8))):
        stem = paths[chance.integers(len(paths))]
        path = stem[: chance.integers(len(stem) + 1)] + chance.integers(32, size=int(chance.integers(10))).tolist()
        paths.append(path if len(path) > 1 else stem)
    return [_sequence(path, chance) for path in paths]


def _made(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind(config).eval()


OPTIONS: list[dict[str, Any]] = [{}, {"micro_batch_tokens": 20}, {"lora": LORA}, {"gradient_checkpointing": True}]


@settings(max_examples=20)
@given(options=st.sampled_from(OPTIONS), seed=st.integers(0, 2**32 - 1))
def test_shared_prefixes_change_neither_logprobs_nor_gradients(
    model_path: Path, options: dict[str, Any], seed: int
) -> None:
    """Any trees, cut or whole, with an adapter or checkpointing: within 1e-5 of sequences that share nothing."""
    sequences = _tree(seed)
    shared, plain = (_model(model_path, sharing, options) for sharing in ("auto", "off"))
    for left, right in zip(shared._scoring.logprobs(sequences), plain._scoring.logprobs(sequences), strict=True):
        assert float((left - right).abs().max()) < 1e-5
    for model in (shared, plain):
        model.discard_gradients()
        model.forward_backward(sequences, PolicyGradient())
    gradients = gradients_of(plain._causal)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest_difference(gradients_of(shared._causal), gradients) < 1e-5 * max(1.0, scale)


_MODELS: dict[str, Any] = {}


def _model(path: Path, sharing: str, options: dict[str, Any]) -> Any:
    key = f"{sharing} {options}"
    if key not in _MODELS:
        _MODELS[key] = load(path, **{"micro_batch_tokens": 4096, **options, "sharing": sharing})
    return _MODELS[key]


def test_what_is_shared_is_computed_once(model_path: Path) -> None:
    """The result says how many tokens went in and how many through the model."""
    chance = np.random.default_rng(0)
    sequences = [_sequence([*range(20), answer, 1, 2, 3], chance) for answer in range(8)]
    found = {sharing: load(model_path, sharing=sharing) for sharing in ("auto", "off")}
    results = {name: model.forward_backward(sequences, PolicyGradient()) for name, model in found.items()}
    assert {name: (one.input_tokens, one.computed_tokens) for name, one in results.items()} == {
        "auto": (192, 44),
        "off": (192, 184),
    }


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen3ForCausalLM, Qwen3Config(**SMALL)),
        (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=32)),
        (
            Qwen2MoeForCausalLM,
            Qwen2MoeConfig(
                **{**SMALL, "num_key_value_heads": 4},
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                num_experts=4,
            ),
        ),
    ],
    ids=["attention", "window", "experts"],
)
def test_models_that_look_at_all_tokens_before_share(kind: Any, config: Any) -> None:
    """Also with a window that is longer than the sequences, and with experts."""
    assert reason_not_to_share(PolicyModule(_made(kind, config))) is None


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=8), "window of 8 tokens is shorter"),
        (Gemma2ForCausalLM, Gemma2Config(**SMALL, query_pre_attn_scalar=8), "soft cap"),
        (GptOssForCausalLM, GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2), "s_aux"),
        (
            Lfm2ForCausalLM,
            Lfm2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}, layer_types=["conv", "full_attention"]),
            "layers of conv",
        ),
        (
            MambaForCausalLM,
            MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=4),
            "layers of linear_attention",
        ),
    ],
    ids=["window", "soft cap", "sinks", "convolution", "recurrent"],
)
def test_models_that_cannot_share_say_why(kind: Any, config: Any, reason: str) -> None:
    """They are trained all the same, without sharing."""
    found = reason_not_to_share(PolicyModule(_made(kind, config)))
    assert found is not None
    assert reason in found


def test_a_difference_is_found_whatever_it_comes_from(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that looks at the token beside it, of which no configuration tells."""
    plain: Any = Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: plain(self, x) + 0.1 * x.roll(1, dims=1))
    found = reason_not_to_share(PolicyModule(reference_model(model_path)))
    assert found is not None
    assert "differ by" in found


def test_longer_sequences_than_the_window_are_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those within it share; all get the log-probabilities that the model gives each alone."""
    _made(MistralForCausalLM, MistralConfig(**SMALL, sliding_window=20)).save_pretrained(tmp_path)
    chance = np.random.default_rng(0)
    sequences = [_sequence([*range(10), *chance.integers(32, size=size)], chance) for size in (3, 5, 30, 40)]
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert not caplog.records
    found = model._scoring.logprobs(sequences)
    assert [one.nodes is None for one in model._policy.passes(sequences, 4096)] == [True, False]
    reference = reference_model(tmp_path)
    for sequence, logprobs in zip(sequences, found, strict=True):
        with torch.no_grad():
            expected = full_logprobs(reference, sequence)[torch.from_numpy(sequence.mask[1:])]
        assert float((logprobs - expected).abs().max()) < 1e-4


def test_a_model_that_falls_back_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line; and it is trained as its own code says, soft cap included."""
    config = Gemma2Config(**SMALL, query_pre_attn_scalar=8, attn_logit_softcapping=2.0)
    _made(Gemma2ForCausalLM, config).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="asyncrl"):
        model = load(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        "sequences share no prefixes: this model has a soft cap on its attention"
    ]
    chance = np.random.default_rng(0)
    sequence = _sequence(chance.integers(32, size=12).tolist(), chance)
    reference = Gemma2ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = full_logprobs(reference, sequence)[torch.from_numpy(sequence.mask[1:])]
    (found,) = model._scoring.logprobs([sequence])
    assert float((found - expected).abs().max()) < 1e-4


def test_the_same_sequences_give_the_same_bits(model_path: Path) -> None:
    """Of log-probabilities and gradients, in trees that are cut."""
    sequences = _tree(3) + _tree(4)
    runs = []
    for _ in range(2):
        model = load(model_path, micro_batch_tokens=25)
        result = model.forward_backward(sequences, PolicyGradient())
        runs.append((result.sums, result.log_ratios, gradients_of(model._causal)))
    assert runs[0][0] == runs[1][0]
    np.testing.assert_array_equal(runs[0][1], runs[1][1])
    assert largest_difference(runs[0][2], runs[1][2]) == 0.0
