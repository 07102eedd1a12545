from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError
from asyncrl.learning.lora import LoraConfig


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
    for targets in ("q_proj", ()):
        with pytest.raises(ConfigError, match=r"lora\.target_modules is"):
            LoraConfig(target_modules=targets)
