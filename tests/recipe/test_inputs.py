"""What a recipe names of the user's own: models, files with rows, and arguments of functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from asyncrl.errors import ConfigError
from asyncrl.recipe.compose import compose, compose_prompts
from asyncrl.recipe.config import load_recipe
from tests.modelfolder import write_model

CODE = """
import asyncrl as rl
from tests.modelfolder import write_model


class Guess(rl.Env):
    async def reset(self, row):
        return []

    async def reward(self, traj, row):
        return 0.0


def train(n=4, seed: int = 0):
    return [{"n": n, "seed": seed}]


def heldout(seed=0, *, hard=False):
    return [{"seed": seed, "hard": hard}]


def anything(**options):
    return [options]


def needs(n):
    return [n]


def build(directory, layers=1):
    write_model(directory, f'{{"vocab_size": {layers}}}')


def half(directory):
    (directory / "config.json").write_text("{}")
"""
RECIPE = """
[env]
factory = "env.py:Guess"
[trainer]
steps = 4
groups_per_step = 2
max_staleness = 0
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe's folder, with a model and an empty cache of the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "env.py").write_text(CODE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    write_model(tmp_path / "model")
    return tmp_path


def _rows(folder: Path, data: str) -> tuple[Any, Any]:
    """The rows for training, and the held-out ones, if the section ``[data]`` is ``data``."""
    recipe = folder / "recipe.toml"
    recipe.write_text(f'{RECIPE}[model]\npath = "model"\n[data]\n{data}')
    run = compose(load_recipe(recipe))
    return run.rows, run.evaluator and run.evaluator.rows


def _model(folder: Path, model: str) -> Path:
    recipe = folder / "recipe.toml"
    recipe.write_text(f'{RECIPE}[data]\ntrain = "env.py:train"\n[model]\n{model}')
    return compose(load_recipe(recipe)).engine.policy.learner.model_path


DATA: list[tuple[str, tuple[Any, Any]]] = [
    ("train = 'env.py:train'", ([{"n": 4, "seed": 0}], None)),
    ("train = 'env.py:train'\nn = 100", ([{"n": 100, "seed": 0}], None)),
    (
        "train = 'env.py:train'\nheldout = 'env.py:heldout'\nseed = 3\nn = 2\nhard = true",
        ([{"n": 2, "seed": 3}], [{"seed": 3, "hard": True}]),
    ),
    ("train = 'env.py:anything'\nwhatever = [1, {a = 2}]", ([{"whatever": [1, {"a": 2}]}], None)),
    ("train = 'rows.jsonl'\nheldout = 'more/rows.csv'", ([{"a": 1}], [{"a": "2"}])),
    ("train = 'rows.jsonl'\nheldout = 'env.py:heldout'\nhard = true", ([{"a": 1}], [{"seed": 0, "hard": True}])),
]


@pytest.mark.parametrize(("data", "rows"), DATA)
def test_rows_come_from_files_and_functions_with_their_arguments(
    folder: Path, data: str, rows: tuple[Any, Any]
) -> None:
    """Each function gets the keys that it takes; paths are relative to the recipe."""
    (folder / "rows.jsonl").write_text('{"a": 1}\n')
    (folder / "more").mkdir()
    (folder / "more" / "rows.csv").write_text("a\n2\n")
    assert _rows(folder, data) == rows


WRONG_DATA: list[tuple[str, str]] = [
    ("train = 'env.py:train'\nm = 1", "data, whose keys are train, heldout and the keywords of their functions: "),
    ("train = 'env.py:train'\nsed = 1", "unknown key 'sed'; did you mean 'seed'?"),
    ("train = 'env.py:train'\nheldotu = 'env.py:heldout'", "unknown key 'heldotu'; did you mean 'heldout'?"),
    ("train = 'env.py:train'\nhard = true", "unknown key 'hard'"),
    ("train = 'rows.jsonl'\nn = 1", "unknown key 'n'; known: heldout, train"),
    ("train = 'env.py:needs'", "the other keys of [data]: missing a required argument: 'n'"),
    ("train = 'rows'", "data.train is 'rows', but must be a file (.jsonl, .ndjson, .json, .csv, .tsv, .parquet) or a"),
    ("train = 'absent.jsonl'", "data.train is 'absent.jsonl', but {folder}/absent.jsonl: cannot be read: No such file"),
    ("train = 'env.py:train'\nheldout = 'rows.jsonl'", "data.heldout is 'rows.jsonl', but {folder}/rows.jsonl: line 2"),
    ("train = 7", "data.train is 7"),
]


@pytest.mark.parametrize(("data", "message"), WRONG_DATA)
def test_what_is_wrong_with_data_is_said_by_its_key(folder: Path, data: str, message: str) -> None:
    """With the recipe's name in front."""
    (folder / "rows.jsonl").write_text('{"a": 1}\n{"a": 2,}\n')
    with pytest.raises(ConfigError) as raised:
        _rows(folder, data)
    assert str(raised.value).startswith(f"{folder / 'recipe.toml'}: ")
    assert message.format(folder=folder) in str(raised.value)


def test_a_model_is_a_folder_or_a_name_in_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the recipe, from the home folder, or of the hub."""
    assert _model(folder, "path = 'model'") == folder / "model"
    monkeypatch.setenv("HOME", str(folder))
    assert _model(folder, "path = '~/model'") == folder / "model"
    store = folder / "hub" / "models--own--model"
    snapshot = write_model(store / "snapshots" / ("a" * 40))
    (store / "refs").mkdir()
    (store / "refs" / "v1").write_text("a" * 40)
    assert _model(folder, "path = 'own/model@v1'") == snapshot
    assert compose_prompts(load_recipe(folder / "recipe.toml")).model == snapshot


def test_a_function_that_makes_a_model_gets_its_options(folder: Path) -> None:
    """Other options make another model, which is kept beside the first."""
    first = _model(folder, "source = 'env.py:build'")
    second = _model(folder, "source = 'env.py:build'\nsource_options = { layers = 2 }")
    assert (first / "config.json").read_text() == '{"vocab_size": 1}'
    assert (second / "config.json").read_text() == '{"vocab_size": 2}'
    assert _model(folder, "source = 'env.py:build'") == first


WRONG_MODELS: list[tuple[str, str]] = [
    ("path = 'own/model'", "model.path is 'own/model', but there is no folder '{folder}/own/model', and the Hugging"),
    ("path = 'own/model'", "To download it from the hub, set model.download = true"),
    ("path = 'own/model'\ndownload = true", "model.path is 'own/model', which could not be downloaded"),
    ("path = 'cache'", "there is no config.json in it"),
    ("source = 'env.py:half'", "what model.source = 'env.py:half' made is "),
    ("source = 'env.py:build'\nsource_options = { depth = 2 }", "got an unexpected keyword argument 'depth'"),
    ("source = 'env.py:build'\ndownload = true", "model.download is True, but must be left out beside model.source"),
    ("path = 'model'\nsource_options = {}", "model.source_options is {{}}, but must be left out without model.source"),
    ("download = true", "[model] must have exactly one of path"),
]


@pytest.mark.parametrize(("model", "message"), WRONG_MODELS)
def test_what_is_wrong_with_a_model_is_said_by_its_key(folder: Path, model: str, message: str) -> None:
    """With the recipe's name in front; and no half model is kept."""
    (folder / "cache").mkdir()
    with pytest.raises(ConfigError) as raised:
        _model(folder, model)
    assert str(raised.value).startswith(f"{folder / 'recipe.toml'}: ")
    assert message.format(folder=folder) in str(raised.value)
    assert not list((folder / "cache").rglob("config.json"))
