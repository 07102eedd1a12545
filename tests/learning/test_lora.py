from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError
from asyncrl.learning.options import LoraConfig


def test_named_modules_and_all_linear_layers() -> None:
    """Both ways to say what is adapted."""
    assert LoraConfig().target_modules == "all-linear"
    assert LoraConfig(target_modules=("q_proj", "v_proj")).target_modules == ("q_proj", "v_proj")


def test_wrong_options_are_refused() -> None:
    """The message names the option; a lone name is a typing mistake for a list of one."""
    with pytest.raises(ConfigError, match=r"lora\.r is 0"):
        LoraConfig(r=0)
    with pytest.raises(ConfigError, match=r"lora\.alpha is 0"):
        LoraConfig(alpha=0)
    for targets in ("q_proj", (), ("",), ("q_proj", None), (7,), ["q_proj"]):
        with pytest.raises(ConfigError, match=r"lora\.target_modules is"):
            LoraConfig(target_modules=targets)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_layers_that_servers_take_no_adapter_of_are_refused_at_once(name: str, place: int) -> None:
    """And not at the first publication, wherever they stand among right ones."""
    targets = ["q_proj", "v_proj"]
    targets.insert(place, name)
    with pytest.raises(ConfigError, match=f"lora.target_modules is {name!r}, but must be a linear layer.*q_proj"):
        LoraConfig(target_modules=tuple(targets))


LINEAR = [
    *(f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"),
    *(f"model.layers.{layer}.mlp.{name}_proj" for layer in range(2) for name in ("gate", "up", "down")),
    "lm_head",
]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("q_prj", "q_proj"), ("gate_porj", "gate_proj"), ("layers.2.self_attn.k_proj", "k_proj"), ("proj", "q_proj")],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_misspelt_name_among_right_ones_is_refused(wrong: str, near: str, place: int) -> None:
    """By itself, with the nearest of the names that there are, none of which is the output layer."""
    targets = ["o_proj", "layers.1.mlp.down_proj"]
    config = LoraConfig(target_modules=tuple(targets))
    config.require_targets(LINEAR)
    LoraConfig().require_targets([])
    targets.insert(place, wrong)
    with pytest.raises(ConfigError) as caught:
        LoraConfig(target_modules=tuple(targets)).require_targets(LINEAR)
    assert f"lora.target_modules is {wrong!r}" in str(caught.value)
    assert "lm_head" not in str(caught.value)
    if wrong != "proj":
        assert f"did you mean {near!r}?" in str(caught.value)
