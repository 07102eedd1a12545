from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.learning.torch_learner import TorchLearner
from asyncrl.recipe.compose import ComposedRun, compose
from asyncrl.recipe.config import load_recipe
from asyncrl.recipe.references import resolve
from tests.modelfolder import write_model

ENV = """
import asyncrl as rl
from tests.modelfolder import write_model

BUILT = []


class Guess(rl.Env):
    def __init__(self, limit: int = 3) -> None:
        self.limit = limit

    async def reset(self, row):
        return []

    async def reward(self, traj, row):
        return 0.0


def open_ended(**options: object) -> rl.Env:
    return Guess()


def rows():
    return [{"number": i} for i in range(4)]


def no_rows():
    return []


def heldout():
    return [{"number": 9}]


def build(directory):
    BUILT.append(directory)
    write_model(directory, '{"vocab_size": 8}')


def late_build(directory):
    write_model(directory, "second")
    write_model(directory.with_name(directory.name[1:].rpartition(".")[0]), "first")  # by another run meanwhile


def broken_build(directory):
    (directory / "half").write_text("")
    raise RuntimeError("out of disk")
"""
RECIPE = """
[model]
path = "model"
[env]
factory = "env.py:Guess"
[data]
train = "env.py:rows"
[trainer]
steps = 4
groups_per_step = 2
max_staleness = 0
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with its Python file and its model folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "env.py").write_text(ENV, encoding="utf-8")
    write_model(tmp_path / "model")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def _compose(recipe: Path, *overrides: str) -> ComposedRun:
    return compose(load_recipe(recipe, overrides))


def test_a_recipe_becomes_a_run(recipe: Path) -> None:
    """Rows, steps and settings arrive; held-out rows make an evaluator."""
    run = _compose(recipe, "data.heldout=env.py:heldout", "evaluation.every=2", "rollout.temperature=0.7")
    assert run.rows == [{"number": i} for i in range(4)]
    assert run.steps == 4
    assert run.engine.settings.temperature == 0.7
    assert run.engine.policy.learner.model_path == recipe.parent / "model"
    assert run.evaluator is not None
    assert (run.evaluator.rows, run.evaluator.every) == ([{"number": 9}], 2)
    assert run.trainer.engine is run.engine


def test_every_key_of_the_model_reaches_the_learner(recipe: Path) -> None:
    """A key that is accepted and then forgotten would train with other settings than the recipe says."""
    learner = _compose(
        recipe,
        "model.micro_batch_tokens=512",
        "model.gradient_checkpointing=true",
        "model.threads=3",
        "model.lora={ r = 4 }",
    ).engine.policy.learner
    assert isinstance(learner, TorchLearner)
    assert (learner.micro_batch_tokens, learner.gradient_checkpointing) == (512, True)
    assert (learner.threads, learner.lora_rank) == (3, 4)


def test_without_heldout_rows_nothing_is_evaluated(recipe: Path) -> None:
    """An evaluator is there exactly if there is something to evaluate."""
    assert _compose(recipe).evaluator is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.factory=env.py:Gues", "env.factory is 'env.py:Gues', but "),
        ("env.factory=env.py:Gues", "has no 'Gues'; did you mean 'Guess'?"),
        ("env.factory=evn.py:Guess", "but there is no file"),
        ("env.factory=Guess", "a reference such as 'env.py:Name'"),
        ("env.factory=no.such.package:Guess", "cannot be imported: ModuleNotFoundError"),
        ("env.factory=env.py:BUILT", "an Env class or a function"),
        ("env.limt=5", "unknown key 'limt'; did you mean 'limit'?"),
        ("data.train=env.py:no_rows", "what data.train = 'env.py:no_rows' returned is []"),
        ("data.heldout=env.py:no_rows", "what data.heldout = 'env.py:no_rows' returned is []"),
        ("trainer.loss=cips", "cips"),
        ("loss.eps_mx=3", "eps_mx"),
        ("model.path=nowhere", "nowhere"),
        ("rollout.temperature=0", "temperature is 0"),
        ("trainer.group_size=1", "group_size is 1"),
    ],
)
def test_mistakes_are_found_before_anything_starts(recipe: Path, override: str, message: str) -> None:
    """The file and the key are named, also for what only the user's own code can tell."""
    with pytest.raises(ConfigError) as raised:
        _compose(recipe, override)
    assert str(raised.value).startswith(f"{recipe}: ")
    assert message in str(raised.value)


def test_an_environment_that_takes_any_keyword_gets_any(recipe: Path) -> None:
    """Only a signature that lists its keywords can be checked."""
    _compose(recipe, "env.factory=env.py:open_ended", "env.whatever=5")


def test_a_file_that_fails_to_import_says_why(recipe: Path) -> None:
    """The error of the user's code is in the message, and a mended file is imported afresh."""
    file = recipe.parent / "env.py"
    file.write_text("raise RuntimeError('no licence')", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be imported: RuntimeError: no licence"):
        _compose(recipe)
    file.write_text(ENV, encoding="utf-8")
    _compose(recipe)


def test_a_file_imports_those_beside_it(recipe: Path) -> None:
    """As a program does, wherever the command was started."""
    name = f"beside_{recipe.parent.name}"
    (recipe.parent / f"{name}.py").write_text("ANSWER = 42\n", encoding="utf-8")
    (recipe.parent / "more.py").write_text(f"from {name} import ANSWER\n", encoding="utf-8")
    assert resolve("env.factory", "more.py:ANSWER", recipe.parent) == 42


def test_a_file_is_imported_once(recipe: Path) -> None:
    """Environment and rows of one file share its module; env.py of another recipe is another module."""
    first = resolve("key", "env.py:Guess", recipe.parent)
    assert resolve("key", "env.py:Guess", recipe.parent) is first
    other = recipe.parent / "other"
    other.mkdir()
    (other / "env.py").write_text(ENV, encoding="utf-8")
    assert resolve("key", "env.py:Guess", other) is not first


def test_a_reference_may_name_an_installed_module() -> None:
    """``package.module:Name`` needs no file beside the recipe."""
    assert resolve("key", "json:dumps", Path()) is json.dumps


def _use_source(recipe: Path, function: str) -> None:
    text = recipe.read_text(encoding="utf-8").replace('path = "model"', f'source = "env.py:{function}"')
    recipe.write_text(text, encoding="utf-8")


def test_a_model_source_is_called_once(recipe: Path) -> None:
    """The second run finds the folder of the first; an edited file makes its own."""
    _use_source(recipe, "build")
    folder = _compose(recipe).engine.policy.learner.model_path
    assert _compose(recipe).engine.policy.learner.model_path == folder
    assert len(resolve("key", "env.py:BUILT", recipe.parent)) == 1
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]
    other = recipe.parent / "other"
    other.mkdir()
    (other / "env.py").write_text(ENV + "# edited\n", encoding="utf-8")
    (other / "recipe.toml").write_text(recipe.read_text(encoding="utf-8"), encoding="utf-8")
    assert _compose(other / "recipe.toml").engine.policy.learner.model_path != folder


def test_a_model_source_that_fails_leaves_nothing(recipe: Path) -> None:
    """Half a model is never taken for one; the error is the function's own."""
    _use_source(recipe, "broken_build")
    with pytest.raises(ConfigError, match=r"broken_build', which raised: RuntimeError: out of disk \(.*env\.py:\d+"):
        _compose(recipe)
    assert list((recipe.parent / "cache/asyncrl/models").iterdir()) == []


def test_a_model_that_another_run_has_made_meanwhile_stays(recipe: Path) -> None:
    """That run may be reading it; the same model made later is thrown away."""
    _use_source(recipe, "late_build")
    folder = _compose(recipe).engine.policy.learner.model_path
    assert (folder / "config.json").read_text(encoding="utf-8") == "first"
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]


def test_a_refused_combination_makes_no_model(recipe: Path) -> None:
    """What the engine and the trainer refuse is refused before the model is made, which may take long."""
    _use_source(recipe, "build")
    with pytest.raises(ConfigError, match="max_staleness is -1"):
        _compose(recipe, "trainer.max_staleness=-1")
    assert not (recipe.parent / "cache").exists()


def test_versions_are_kept_by_two_servers_of_the_run_s_own_but_not_by_one(recipe: Path) -> None:
    """Before there is a model, the checks know how many servers there will be."""
    _use_source(recipe, "build")
    servers = ("sampler.backend=sglang", "sampler.device=cpu", f"sampler.python={sys.executable}")
    with pytest.raises(ConfigError, match="sample on two or more servers"):
        _compose(recipe, *servers, "trainer.max_staleness=1")
    assert not (recipe.parent / "cache").exists()
    _compose(recipe, *servers, "trainer.max_staleness=1", "sampler.servers=2")
