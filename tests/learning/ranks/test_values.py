"""Arguments and results of a learner's methods as JSON and arrays, losses among them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learning.base import OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import CISPO, PPO
from asyncrl.learning.modelhost import ModelOptions
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.ranks.frames import Frame
from asyncrl.learning.ranks.values import any_class, own_class, pack, unpack
from tests.learning.ranks.fakeranks import sequence

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A loss made of others, as a user may write one."""

    losses: tuple[Any, ...]
    bounds: tuple[float, float] = (0.0, float("inf"))


def _there_and_back(value: object) -> Any:
    packed, arrays = pack("value", value)
    frame = Frame.decoded(orjson.dumps(packed) if isinstance(packed, dict) else b"{}", Frame.of({}, arrays).payload)
    return unpack(orjson.loads(orjson.dumps(packed)), frame.arrays(), any_class)


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value: object) -> None:
    """Tuples stay tuples, and a mapping may have any text as a key."""
    assert _there_and_back(value) == value


def test_losses_and_options_arrive_as_they_were(tmp_path: Path) -> None:
    """Frozen dataclasses, one in another, with numbers that JSON has no sign for."""
    options = ModelOptions(path=tmp_path, adapter=None, options={"lora": LoraConfig(target_modules=("q_proj",))})
    for value in (CISPO(eps_max=4.5), Composed(losses=(PPO(clip_low=0.1), Composed(losses=()))), options):
        assert _there_and_back(value) == value


def test_sequences_arrive_as_they_were() -> None:
    """Every field of each, by name, whatever its length."""
    sequences = [sequence(*range(length)) for length in (3, 1, 7)]
    for sent, found in zip(sequences, _there_and_back(sequences), strict=True):
        for field in dataclasses.fields(TrainingSequence):
            there, here = getattr(sent, field.name), getattr(found, field.name)
            assert type(here) is type(there)
            np.testing.assert_array_equal(here, there)


def _local_loss() -> object:
    @dataclass(frozen=True)
    class Local:
        pass

    return Local()


@dataclass
class Loose:
    """Not frozen."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Loose(), r"loss is .*must be a frozen dataclass .*worker = 'thread'"),
        (lambda inputs: inputs, r"loss is .*must be a frozen dataclass"),
        (_local_loss(), r"loss is of the class .*<locals>.*define it at the top of a module"),
        (Composed(losses=(CISPO(), Loose())), r"loss\.losses\[1\] is"),
        ({1: 2}, r"loss is .*must be"),
    ],
    ids=["not-frozen", "function", "local", "inside", "keys"],
)
def test_what_cannot_travel_is_refused_with_what_to_do(value: object, text: str) -> None:
    """By the path to it."""
    with pytest.raises(ConfigError, match=text):
        pack("", {"loss": value})


def test_the_class_of_a_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes have another ``__main__``."""
    monkeypatch.setattr(Composed, "__module__", "__main__")
    with pytest.raises(ConfigError, match="a module of its own, beside the script"):
        pack("loss", Composed(losses=()))


def test_a_class_in_a_recipes_file_is_found_by_the_file(tmp_path: Path) -> None:
    """Its module has a name that no path leads to."""
    file = tmp_path / "losses.py"
    file.write_text("import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Mine:\n    cap: float\n", "utf-8")
    value = {"$": "object", "class": "asyncrl_recipe_ranks_test:Mine", "file": str(file), "value": {"cap": 2.0}}
    assert unpack(value, {}, any_class).cap == 2.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent_module_of_nobody:Loss", "cannot be imported where the learner's ranks run"),
        ("asyncrl.learning.losses:Absent", "cannot be imported"),
        ("os:system", "must be a frozen dataclass"),
    ],
)
def test_a_class_that_is_not_there_is_refused(name: str, text: str) -> None:
    """On the ranks' side, with what to do."""
    with pytest.raises(ConfigError, match=text):
        any_class(name, None)


def test_a_driver_takes_only_classes_of_asyncrl_from_its_ranks() -> None:
    """What else the other side names is not imported."""
    settings = OptimizerSettings(lr=1.0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0, grad_clip_norm=None)
    packed, arrays = pack("result", settings)
    assert unpack(packed, arrays, own_class) == settings
    with pytest.raises(LearnerError, match="no class of asyncrl"):
        own_class("tests.learning.ranks.test_values:Composed", None)
