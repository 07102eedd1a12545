from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from asyncrl.errors import ConfigError, NonFiniteError
from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.losses import CISPO, DecoupledPPO, LossInputs, LossOutput, PolicyGradient
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.policymodule import PolicyModule
from asyncrl.learning.prefixtrees import Pass
from asyncrl.learning.torch_model import TorchModel
from asyncrl.learning.torch_peers import Alone
from asyncrl.types import FloatArray
from tests.learning.tiny import (
    CLOSE,
    GRADIENTS_CLOSE,
    LORA,
    adam_settings,
    full_logprobs,
    gradients_of,
    ids,
    largest_difference,
    load,
    parameters_of,
    random_sequences,
    reference_model,
    train_step,
)


@pytest.fixture
def trained(model_path: Path) -> TorchModel:
    """All weights of the model are trained."""
    return load(model_path)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_equal_those_of_all_logits(trained: TorchModel, model_path: Path, temperature: float) -> None:
    """Temperature divides the logits, not the log-probabilities."""
    tokens = ids(3, 1, 4, 1, 5, 9)
    (sequence,) = random_sequences(0, 1)
    sequence = TrainingSequence(
        tokens=tokens,
        logprobs=sequence.logprobs,
        mask=sequence.mask,
        ages=sequence.ages,
        advantage=1,
        weight=1,
        temperature=temperature,
    )
    with torch.no_grad():
        expected = full_logprobs(reference_model(model_path), sequence).numpy()
    found = trained.logprobs(tokens, 2, temperature)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected[1:], atol=CLOSE)


def test_the_gradient_equals_a_plain_computation(trained: TorchModel, model_path: Path) -> None:
    """Padded micro-batches of mixed temperatures against one sequence at a time with all logits."""
    sequences = random_sequences(1)
    result = trained.forward_backward(sequences, CISPO())
    reference = reference_model(model_path)
    sums = {"loss": 0.0, "ratio": 0.0, "entropy": 0.0}
    for sequence in sequences:
        mask = torch.from_numpy(sequence.mask[1:])
        logprobs = full_logprobs(reference, sequence)[mask]
        sampled = torch.from_numpy(sequence.logprobs[1:])[mask]
        output = CISPO().per_token(
            LossInputs(
                logprobs=logprobs,
                sampled_logprobs=sampled,
                advantages=torch.full_like(sampled, sequence.advantage),
                ages=torch.zeros(len(sampled)),
            )
        )
        (output.loss.sum() * sequence.weight).backward()
        sums["loss"] += float(output.loss.detach().sum())
        sums["ratio"] += float(output.diagnostics["ratio"].sum())
        tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
        logits = reference(input_ids=tokens[None]).logits.detach()[0, :-1][mask] / sequence.temperature
        sums["entropy"] += float(torch.distributions.Categorical(logits=logits).entropy().sum())
    assert largest_difference(gradients_of(trained._causal), gradients_of(reference)) < GRADIENTS_CLOSE
    assert result.tokens == sum(int(sequence.mask.sum()) for sequence in sequences)
    assert {name: result.sums[name] for name in sums} == pytest.approx(sums, rel=1e-4, abs=1e-3)


class _WholeSequences:
    """-A exp(mean of logp - mu): one ratio for each sequence, as in arXiv 2507.18071 without the clip."""

    token_data = ()
    diagnostics = ()

    def __init__(self) -> None:
        self.passes: list[Sequence[int]] = []

    def per_token(self, inputs: LossInputs) -> LossOutput:
        self.passes.append(inputs.tokens_B)
        parts = (inputs.logprobs - inputs.sampled_logprobs).split(list(inputs.tokens_B))
        ratios = torch.cat([part.mean().exp().expand(len(part)) for part in parts])
        return LossOutput(loss=-ratios * inputs.advantages, diagnostics={})


class _Elsewhere(Alone):
    """All passes count in another rank."""

    def shares(
        self, policy: PolicyModule, sequences: Sequence[TrainingSequence], max_tokens: int
    ) -> Iterable[tuple[Pass, float]]:
        return [(one, 0.0) for one in policy.passes(sequences, max_tokens)]


def test_a_pass_that_counts_elsewhere_adds_nothing_here(model_path: Path) -> None:
    """Also where a ratio is infinite, which times 0 is no number."""
    sequences = random_sequences(3)
    for one in sequences:
        one.logprobs[one.mask] = -np.inf
    model = load(model_path, peers=_Elsewhere())
    result = model.forward_backward(sequences, PolicyGradient())
    assert not np.any(result.log_ratios)
    assert set(result.sums.values()) == {0.0}
    assert all(not gradient.any() for gradient in gradients_of(model._causal).values())


class _Reshaped:
    """The plain loss of each token in another shape, or a number beside it in one."""

    token_data = ()
    diagnostics = ("column",)

    def __init__(self, *, loss: tuple[int, ...], beside: tuple[int, ...]) -> None:
        self.loss, self.beside = loss, beside

    def per_token(self, inputs: LossInputs) -> LossOutput:
        values = -inputs.advantages * inputs.logprobs
        whole = values.sum() if self.loss == () else values.reshape(self.loss)
        return LossOutput(loss=whole, diagnostics={"column": values.detach().reshape(self.beside)})


@pytest.mark.parametrize(
    ("loss", "beside", "name"), [((-1, 1), (-1,), "loss"), ((), (-1,), "loss"), ((-1,), (1, -1), "column")]
)
def test_a_loss_of_another_shape_is_refused(
    model_path: Path, loss: tuple[int, ...], beside: tuple[int, ...], name: str
) -> None:
    """Broadcasting would make a sum of it that nobody meant."""
    with pytest.raises(ConfigError, match=rf"the shape of the loss's '{name}' is .*, a value for each trained token"):
        load(model_path).forward_backward(random_sequences(3), _Reshaped(loss=loss, beside=beside))


@pytest.mark.parametrize("micro_batch_tokens", [4096, 26, 1])
def test_a_loss_can_look_at_whole_sequences(model_path: Path, micro_batch_tokens: int) -> None:
    """It is told which tokens belong together, and they do however the sequences are divided into passes."""
    sequences, loss = random_sequences(5), _WholeSequences()
    trained = [int(sequence.mask.sum()) for sequence in sequences]
    model = load(model_path, micro_batch_tokens=micro_batch_tokens)
    model.forward_backward(sequences, loss)
    assert sorted(tokens for tokens_B in loss.passes for tokens in tokens_B) == sorted(trained)
    assert len(loss.passes) == {4096: 1, 26: 3, 1: 6}[micro_batch_tokens]
    reference = reference_model(model_path)
    for sequence in sequences:
        mask = torch.from_numpy(sequence.mask[1:])
        log_ratios = full_logprobs(reference, sequence)[mask] - torch.from_numpy(sequence.logprobs[1:])[mask]
        (-log_ratios.mean().exp() * sequence.advantage * len(log_ratios)).backward()
    assert largest_difference(gradients_of(model._causal), gradients_of(reference)) < GRADIENTS_CLOSE


def test_nothing_to_train(trained: TorchModel) -> None:
    """No sequences: no tokens, no sums, no gradient."""
    result = trained.forward_backward([], CISPO())
    assert (result.tokens, dict(result.sums)) == (0, {})
    assert gradients_of(trained._causal) == {}


def test_sequences_without_trained_tokens_change_nothing(trained: TorchModel) -> None:
    """All masked: they do not go through the model, and beside others they do not matter."""
    sequence = random_sequences(3, 1)[0]
    masked = TrainingSequence(
        tokens=sequence.tokens,
        logprobs=sequence.logprobs,
        mask=np.zeros(len(sequence.tokens), dtype=np.bool_),
        ages=np.zeros(len(sequence.tokens), dtype=np.int32),
        advantage=1.0,
        weight=1.0,
    )
    result = trained.forward_backward([masked], CISPO())
    assert (result.tokens, dict(result.sums), result.computed_tokens) == (0, {}, 0)
    assert gradients_of(trained._causal) == {}
    trained.forward_backward([sequence], CISPO())
    alone = gradients_of(trained._causal)
    trained.discard_gradients()
    trained.forward_backward([sequence, masked], CISPO())
    assert largest_difference(gradients_of(trained._causal), alone) < GRADIENTS_CLOSE


def test_the_step_is_adam_on_the_divided_and_clipped_gradient(model_path: Path) -> None:
    """One step of torch's own optimizer on the plainly computed gradient gives the same weights."""
    model, expected = load(model_path), load(model_path)
    sequences = random_sequences(4)
    for each in (model, expected):
        each.forward_backward(sequences, CISPO())
    settings = adam_settings(lr=0.01, weight_decay=0.1, grad_clip_norm=0.5)
    parameters = list(expected._causal.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad /= 7.0
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    reported = model.optimizer_step(settings, 7.0)
    assert reported == {"grad_norm": pytest.approx(float(norm), rel=1e-5), "lr": 0.01}
    assert float(norm) > 0.5, "the clip must have something to do"
    assert largest_difference(parameters_of(model), parameters_of(expected)) < 1e-5
    assert gradients_of(model._causal) == {}


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])  # the last: only the norm is infinite
def test_a_gradient_that_is_not_finite_changes_nothing(model_path: Path, value: float) -> None:
    """The step is refused before any parameter or optimizer state changes, and the gradient is gone."""
    model = load(model_path)
    train_step(model, random_sequences(5))
    before = parameters_of(model)
    broken = random_sequences(6, 1, weight=value)
    model.forward_backward(broken, CISPO())
    with pytest.raises(NonFiniteError, match="no step was taken"):
        model.optimizer_step(adam_settings(), 1.0)
    assert largest_difference(parameters_of(model), before) == 0.0
    train_step(model, random_sequences(7))
    clean = load(model_path)
    train_step(clean, random_sequences(5))
    train_step(clean, random_sequences(7))
    assert largest_difference(parameters_of(model), parameters_of(clean)) == 0.0


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_same_seed_gives_the_same_bits(model_path: Path, lora: LoraConfig | None) -> None:
    """Two learners, three steps each: equal losses and parameters to the last bit."""
    runs = []
    for _ in range(2):
        model = load(model_path, lora=lora, micro_batch_tokens=30)
        losses = []
        for seed in range(3):
            losses.append(model.forward_backward(random_sequences(seed), CISPO()).sums)
            model.optimizer_step(adam_settings(), 10.0)
        runs.append((losses, parameters_of(model)))
    assert runs[0][0] == runs[1][0]
    assert largest_difference(runs[0][1], runs[1][1]) == 0.0


def test_the_proximal_policy_is_that_of_the_step_s_start(model_path: Path) -> None:
    """Kept for each sequence, whatever chunk and micro-batch it comes in, and forgotten after the step."""
    model = load(model_path, micro_batch_tokens=30)
    sequences = random_sequences(8)
    model.prepare_step(sequences, DecoupledPPO())
    plain = load(model_path)
    expected = plain.forward_backward(sequences, CISPO(eps_max=5.0))
    # At the step's start the inner ratio is 1, and what is left is CISPO with the cap of the behaviour weight.
    found = [model.forward_backward(chunk, DecoupledPPO()) for chunk in (sequences[4:], sequences[:4])]
    assert largest_difference(gradients_of(model._causal), gradients_of(plain._causal)) < GRADIENTS_CLOSE
    assert sum(result.tokens for result in found) == expected.tokens
    assert sum(result.sums["ratio"] for result in found) == pytest.approx(expected.sums["ratio"], rel=1e-4)
    model.optimizer_step(adam_settings(), 10.0)
    model.forward_backward(sequences, DecoupledPPO())
    model.end_step()
    with pytest.raises(KeyError):
        model.forward_backward(sequences, DecoupledPPO())


@pytest.mark.parametrize("lora", [None, LORA])
def test_checkpointing_computes_twice_and_gives_the_same_gradient(model_path: Path, lora: LoraConfig | None) -> None:
    """Each layer runs forward once more in the backward pass, and nothing else changes."""
    gradients = []
    for checkpointing, runs in ((False, 2), (True, 4)):
        model = load(model_path, lora=lora, gradient_checkpointing=checkpointing)
        calls: list[object] = []
        for module in model._causal.modules():
            if type(module).__name__ == "Qwen3MLP":
                module.register_forward_pre_hook(lambda module, inputs, calls=calls: calls.append(module))
        model.forward_backward(random_sequences(13), CISPO())
        assert len(calls) == runs
        gradients.append(gradients_of(model._causal))
    assert largest_difference(*gradients) < GRADIENTS_CLOSE


def test_small_updates_of_sixteen_bit_weights_add_up(model_path: Path, tmp_path: Path) -> None:
    """Fifty steps that are each below the rounding of bfloat16 move the weights; the export has their dtype."""
    model = load(model_path, dtype="bfloat16")
    before = parameters_of(model)
    sequences = random_sequences(14, 2)
    for _ in range(50):
        model.forward_backward(sequences, PolicyGradient())
        model.optimizer_step(adam_settings(lr=1e-4), 10.0)
    name = "model.layers.0.self_attn.q_norm.weight"  # all ones, where bfloat16 has steps of 0.004 and more
    moved = (parameters_of(model)[name] - before[name]).abs().max()
    assert 0.002 < float(moved) < 0.02
    model.export(tmp_path)
    assert {tensor.dtype for tensor in AutoModelForCausalLM.from_pretrained(tmp_path).parameters()} == {torch.bfloat16}


def test_sixteen_bit_gradients_are_summed(model_path: Path) -> None:
    """Two passes have twice the gradient of one: the copies that the optimizer works on add up."""
    norms = []
    for passes in (1, 2):
        model = load(model_path, dtype="bfloat16")
        for _ in range(passes):
            model.forward_backward(random_sequences(15), PolicyGradient())
        norms.append(model.optimizer_step(adam_settings(), float(passes))["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off(model_path: Path, tmp_path: Path, checkpointing: bool) -> None:
    """A model that asks for it is trained without, so that it agrees with its sampler."""
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    config = orjson.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(orjson.dumps({**config, "attention_dropout": 0.5}))
    losses = [
        load(path, gradient_checkpointing=checkpointing).forward_backward(random_sequences(16), CISPO()).sums["loss"]
        for path in (model_path, tmp_path)
    ]
    assert losses[0] == losses[1]


def test_an_unknown_device_is_refused(model_path: Path) -> None:
    """The message names the option."""
    with pytest.raises(ConfigError, match=r"model\.device is 'gpu'"):
        load(model_path, device="gpu")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA])
def test_it_learns_a_bandit(model_path: Path, lora: LoraConfig | None) -> None:
    """One prompt, 32 arms of which one pays: REINFORCE takes its probability from below 0.15 to over 0.75."""
    model = load(model_path, lora=lora)
    chance = np.random.default_rng(0)

    def probabilities() -> FloatArray:
        return np.exp([model.logprobs(ids(1, arm), 1, 1.0)[0] for arm in range(32)])

    assert probabilities()[7] < 0.15
    for _ in range(40):
        policy = probabilities()
        arms = chance.choice(32, 64, p=policy / policy.sum())
        rewards = (arms == 7).astype(np.float32)
        sequences = [
            TrainingSequence(
                tokens=ids(1, arm),
                logprobs=np.log([1.0, policy[arm]]).astype(np.float32),
                mask=np.array([False, True]),
                ages=np.zeros(2, dtype=np.int32),
                advantage=float(reward - rewards.mean()),
                weight=1.0,
            )
            for arm, reward in zip(arms, rewards, strict=True)
        ]
        model.forward_backward(sequences, PolicyGradient())
        model.optimizer_step(adam_settings(lr=5e-3), 64.0)
    assert probabilities()[7] > 0.75


def test_a_model_that_changes_its_logits_is_refused(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the output layer is not in the learner's passes, so its log-probabilities would be wrong."""
    plain = Qwen3ForCausalLM.forward

    def capped(self: Any, *args: Any, **options: Any) -> Any:
        output = plain(self, *args, **options)
        output.logits = (output.logits * 100).tanh() / 100
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", capped)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM computes its logits"):
        load(model_path)
