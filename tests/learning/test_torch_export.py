from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.errors import ConfigError
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.torch_model import TorchModel
from asyncrl.types import FloatArray
from tests.learning.tiny import (
    CLOSE,
    LORA,
    full_logprobs,
    ids,
    largest_difference,
    load,
    parameters_of,
    random_sequences,
    reference_model,
    train_step,
)


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(model_path: Path) -> None:
    """B is 0 at first; after a step the base weights are what they were."""
    model = load(model_path, lora=LORA)
    tokens = ids(3, 1, 4, 1, 5)
    np.testing.assert_array_equal(model.logprobs(tokens, 1, 1.0), load(model_path).logprobs(tokens, 1, 1.0))
    before = parameters_of(model)
    train_step(model, random_sequences(9))
    changed = {name for name, value in parameters_of(model).items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert all("lora_" in name for name, parameter in model._causal.named_parameters() if parameter.requires_grad)


def test_the_seed_draws_the_adapter(model_path: Path) -> None:
    """The same seed, the same adapter; another seed, another one."""
    first, same, other = (parameters_of(load(model_path, lora=LORA, seed=seed)) for seed in (1, 1, 2))
    assert largest_difference(first, same) == 0.0
    assert largest_difference(first, other) > 0.0


def test_an_exported_adapter_loads_in_peft_and_predicts_the_same(model_path: Path, tmp_path: Path) -> None:
    """A plain PEFT folder: standard key names, module names spelled out, the scale alpha / r."""
    import peft
    from safetensors import safe_open

    model = load(model_path, lora=LORA)
    train_step(model, random_sequences(10))
    model.export(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = orjson.loads((tmp_path / "adapter_config.json").read_bytes())
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == modules
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8, False)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert len(names) == 2 * 2 * len(modules)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    adapted = peft.PeftModel.from_pretrained(reference_model(model_path), tmp_path).eval()
    _assert_same_predictions(model, adapted)


def test_a_list_of_modules_is_what_is_adapted(model_path: Path, tmp_path: Path) -> None:
    """Named modules, and an error that names the option if the model has none of that name."""
    targets = LoraConfig(r=2, target_modules=("v_proj", "q_proj"))
    load(model_path, lora=targets).export(tmp_path)
    config = orjson.loads((tmp_path / "adapter_config.json").read_bytes())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    with pytest.raises(ConfigError, match=r"lora\.target_modules is 'query'"):
        load(model_path, lora=LoraConfig(target_modules=("query",)))
    for wrong in ("v_porj", "input_layernorm", "self_attn", "layers.9.self_attn.q_proj"):
        with pytest.raises(ConfigError, match=rf"lora\.target_modules is '{wrong}', but must be linear layers"):
            load(model_path, lora=LoraConfig(target_modules=("q_proj", wrong)))


def test_an_exported_model_loads_in_transformers_and_predicts_the_same(model_path: Path, tmp_path: Path) -> None:
    """A whole model folder with the tokenizer's files, the same configuration, and weights in their own dtype."""
    model = load(model_path)
    train_step(model, random_sequences(11))
    model.export(tmp_path)
    for name in ("tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (model_path / name).read_bytes()
    exported, source = (orjson.loads((path / "config.json").read_bytes()) for path in (tmp_path, model_path))
    assert exported == source
    reloaded = reference_model(tmp_path)
    assert largest_difference(dict(reloaded.named_parameters()), parameters_of(model)) == 0.0
    _assert_same_predictions(model, reloaded)
    again = load(tmp_path)
    np.testing.assert_array_equal(again.logprobs(ids(1, 2, 3), 1, 1.0), model.logprobs(ids(1, 2, 3), 1, 1.0))


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_weights_are_those_of_the_exported_files(model_path: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    """The same names, types and values, each tensor once; and a later step does not change what was taken."""
    model = load(model_path, lora=lora)
    train_step(model, random_sequences(13))
    model.export(tmp_path)
    weights = model.weights()
    train_step(model, random_sequences(14))
    (file,) = tmp_path.glob("*.safetensors")
    exported = load_file(file)
    assert set(weights) == set(exported)
    assert all(torch.equal(weights[name], exported[name]) for name in exported)
    assert all(weights[name].dtype == exported[name].dtype for name in exported)
    if lora is not None:
        assert model.adapter_config() == orjson.loads((tmp_path / "adapter_config.json").read_bytes())


def test_a_tied_output_layer_is_sent_once(tmp_path: Path, model_path: Path) -> None:
    """As in the file: servers tie it themselves."""
    folder = shutil.copytree(model_path, tmp_path / "tied")
    config = orjson.loads((folder / "config.json").read_bytes()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    model.export(tmp_path)
    assert "lm_head.weight" not in model.weights()
    assert set(model.weights()) == set(load_file(tmp_path / "model.safetensors"))


def _assert_same_predictions(model: TorchModel, other: Any) -> None:
    for sequence in random_sequences(12, 3):
        with torch.no_grad():
            expected = full_logprobs(other, sequence).numpy()
        found: FloatArray = model.logprobs(sequence.tokens, 1, sequence.temperature)
        np.testing.assert_allclose(found, expected, atol=CLOSE)
