from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.recipe.config import SECTIONS, Recipe, load_recipe
from asyncrl.servers.machine import cache_directory

_LATER = ("evaluator", "checkpointing", "events")
ENVS = Path(__file__).parents[2] / "envs"
RECIPE = """
[model]
path = "model"

[env]
factory = "env.py:Guess"
limit = 5

[data]
train = "env.py:rows"

[trainer]
steps = 4
groups_per_step = 2

[optimizer]
lr = 1e-3
"""


def _load(directory: Path, text: str = RECIPE, *overrides: str) -> Recipe:
    path = directory / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides)


def test_a_short_recipe_has_the_defaults_of_python(tmp_path: Path) -> None:
    """What a recipe does not say is what a script that does not say it gets."""
    recipe = _load(tmp_path)
    assert recipe.env.options == {"limit": 5}
    assert recipe.steps == 4
    assert recipe.trainer["optimizer"] == rl.Adam(lr=1e-3)
    assert (recipe.engine["budget"], recipe.engine["schedule"]) == (rl.Budget(), rl.Schedule())
    assert (recipe.trainer["completion"], recipe.trainer["truncation"]) == (rl.GroupCompletion(), rl.Truncation())
    assert recipe.trainer["advantage"] == rl.GroupCentered()
    assert recipe.learner["lora"] is None


@pytest.mark.parametrize("recipe", sorted(ENVS.glob("*/recipe*.toml")), ids=lambda path: path.parent.name)
def test_the_recipes_that_come_with_asyncrl_are_right(recipe: Path) -> None:
    """A renamed option cannot be forgotten in them."""
    assert load_recipe(recipe).tables


@pytest.mark.parametrize(
    ("section", "owner", "given"),
    [
        ("model", rl.TorchLearner, {"model", "seed", "log"}),
        ("trainer", rl.AsyncTrainer, {"engine", "optimizer", "advantage", "completion", "truncation", *_LATER}),
        ("rollout", rl.RolloutEngine, {"policy", "env", "budget", "schedule", "failures"}),
        ("evaluation", rl.Evaluator, {"rows"}),
        ("checkpoint", rl.Checkpointing, {"run_dir", "on_signal"}),
        ("schedule", rl.Schedule, set()),
    ],
)
def test_sections_have_the_options_and_defaults_of_their_owners(section: str, owner: Any, given: set[str]) -> None:
    """An option or a default that changes in the owner changes in recipes too; what others give has no key."""
    keys = {name: key for part in SECTIONS[section] for name, key in part.items()}
    parameters = inspect.signature(owner).parameters
    assert parameters.keys() - keys.keys() == given
    for name in parameters.keys() & keys.keys():
        assert keys[name].default == parameters[name].default, name


def test_all_sections_are_read(tmp_path: Path) -> None:
    """Every table of a full recipe arrives at its object."""
    text = RECIPE.replace('path = "model"', 'source = "env.py:build"\nlora = { r = 4, alpha = 8 }\ndtype = "bfloat16"')
    text = text.replace("groups_per_step = 2", 'groups_per_step = 2\nloss = "ppo"\nforward_backward_batch = "off"')
    text = text.replace("lr = 1e-3", 'lr = 1e-3\nweight_decay = 0.1\nschedule = "cosine"\nwarmup = 3\nfloor = 0.1')
    text += """
[sampler]
backend = "sglang"
urls = ["http://127.0.0.1:30000"]

[rollout]
seed = 7
sampling_policy = "segment"
kv_cache = { on_limit = "refill", allow_reprefill = true }

[budget]
max_turns = 3

[schedule]
concurrency = 12

[completion]
min_members = 3

[truncation]
train = "reward"
by_cause = { turns = "zero_reward" }

[loss]
clip_low = 0.1

[advantage]
kind = "batchwise"
standardize = true

[evaluation]
every = 10

[run]
log = "json"
"""
    recipe = _load(tmp_path, text)
    assert recipe.learner["lora"] == rl.LoraConfig(r=4, alpha=8)
    assert recipe.sampler.urls == ("http://127.0.0.1:30000",)
    assert recipe.engine["kv_cache"] == rl.KVCache(on_limit="refill", allow_reprefill=True)
    assert recipe.engine["budget"] == rl.Budget(max_turns=3)
    assert recipe.engine["schedule"] == rl.Schedule(concurrency=12)
    assert recipe.trainer["completion"] == rl.GroupCompletion(min_members=3)
    assert recipe.trainer["truncation"] == rl.Truncation(train="reward", by_cause={"turns": "zero_reward"})
    assert recipe.trainer["loss"] == rl.PPO(clip_low=0.1)
    assert recipe.trainer["forward_backward_batch"] is None
    assert recipe.trainer["advantage"] == rl.Batchwise(standardize=True)
    assert recipe.trainer["optimizer"] == rl.Adam(lr=1e-3, weight_decay=0.1, schedule=rl.cosine(warmup=3, floor=0.1))
    assert recipe.evaluation["every"] == 10
    assert recipe.run.log == "json"
    assert recipe.tables["run"] == {"log": "json"}


def test_what_stands_beside_a_loss(tmp_path: Path) -> None:
    """Tables of the trainer; without them there is nothing."""
    tables = """
[trainer.correction]
token = "mask"
token_low = 0.5
veto_high = inf

[trainer.kl]
coefficient = 0.001
where = "reward"

[trainer.overlong]
max_tokens = 100
buffer = 20
"""
    recipe = _load(tmp_path, RECIPE + tables)
    assert recipe.trainer["correction"] == rl.Correction(token="mask", token_low=0.5)
    assert recipe.trainer["kl"] == rl.KLPenalty(coefficient=0.001, where="reward")
    assert recipe.trainer["overlong"] == rl.OverlongPenalty(max_tokens=100, buffer=20)
    bare = _load(tmp_path).trainer
    assert [bare[name] for name in ("correction", "kl", "overlong")] == [None] * 3
    with pytest.raises(ConfigError, match=r"kl\.kind is 'k4'|trainer\.kl"):
        _load(tmp_path, RECIPE + '[trainer.kl]\ncoefficient = 0.1\nkind = "k4"\n')


@pytest.mark.parametrize(
    ("kind", "advantage"),
    [
        ("leave_one_out", rl.LeaveOneOut()),
        ("max_rl", rl.MaxRL()),
        ("reinforce_plus_plus", rl.ReinforcePlusPlus()),
        ("group_centered", rl.GroupCentered()),
    ],
)
def test_advantages_by_name(tmp_path: Path, kind: str, advantage: object) -> None:
    """A key of another one is refused."""
    assert _load(tmp_path, RECIPE, f"advantage.kind={kind}").trainer["advantage"] == advantage
    if kind != "group_centered":
        with pytest.raises(ConfigError, match=r"advantage"):
            _load(tmp_path, RECIPE, f"advantage.kind={kind}", "advantage.standardize=true")


def test_learning_rate_schedules_by_name(tmp_path: Path) -> None:
    """Each with its keys; a constant rate needs no object, and no floor."""
    named = [
        (["optimizer.schedule=linear", "optimizer.floor=0.5"], rl.linear(floor=0.5)),
        (["optimizer.schedule=cosine"], rl.cosine()),
        (["optimizer.warmup=3"], rl.constant(warmup=3)),
        ([], None),
    ]
    for overrides, schedule in named:
        assert _load(tmp_path, RECIPE, *overrides).trainer["optimizer"].schedule == schedule


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.group_sise=4"], "trainer: unknown key 'group_sise'; did you mean 'group_size'?"),
        (["trianer.steps=4"], "recipe: unknown key 'trianer'; did you mean 'trainer'?"),
        (["trainer.steps=0"], "trainer.steps is 0"),
        (["trainer.stale_policy=hope"], "trainer.stale_policy is 'hope'"),
        (["schedule.concurrency=-1"], "schedule.concurrency is -1"),
        (["budget.max_turns=many"], "budget.max_turns is 'many'"),
        (
            [
                "budget=5",
            ],
            "section.key=value",
        ),
        (["optimizer.lr=fast"], "optimizer.lr is 'fast'"),
        (["optimizer.warmap=3"], "optimizer: unknown key 'warmap'; did you mean 'warmup'?"),
        (["optimizer.floor=0.1"], "optimizer.schedule is 'constant', but must be 'linear' or 'cosine' if floor is set"),
        (["optimizer.schedule=linaer"], "optimizer.schedule is 'linaer'"),
        (["advantage.kind=gae"], "advantage.kind is 'gae', but must be one of 'group_centered', 'batchwise'"),
        (["advantage.standardise=true"], "advantage: unknown key 'standardise'; did you mean 'standardize'?"),
        (["model.source=env.py:build"], "exactly one of path"),
        (["model.lora.rank=4"], "model.lora: unknown key 'rank'"),
        (
            ["sampler.backend=embedded", "sampler.urls=[]", "sampler.servers=2"],
            "sampler.servers is 2, but must be 1 or left out",
        ),
        (["sampler.backend=sglang", "sampler.urls=[]", "sampler.servers=0"], "sampler.servers is 0"),
        (["sampler.urls=['http://a']"], "sampler.urls is ['http://a']"),
        (["sampler.backend=sglang", "sampler.urls=['http://a']", "sampler.urls_file=u"], "sampler.urls_file is 'u'"),
        (["sampler.backend=sglang", "sampler.urls=[]", "sampler.router=http://r"], "sampler.router is 'http://r'"),
        (
            ["sampler.retries=7"],
            "sampler.retries is 7, but must be 3 or left out, for it is about servers of sampler.urls",
        ),
        (
            ["sampler.memory_fraction=0.5"],
            "sampler.memory_fraction is 0.5, but must be left out, for it is about servers",
        ),
        (["model.dtype=int8"], "model.dtype is 'int8', but must be 'float32' or 'bfloat16'"),
        (["run.log=xml"], "run.log is 'xml'"),
    ],
)
def test_mistakes_name_the_file_the_key_and_the_value(tmp_path: Path, overrides: list[str], message: str) -> None:
    """One line tells what to change and where."""
    with pytest.raises(ConfigError) as raised:
        _load(tmp_path, RECIPE, *overrides)
    assert str(raised.value).startswith(f"{tmp_path / 'recipe.toml'}: ")
    assert message in str(raised.value)


def test_a_missing_section_names_what_it_needs(tmp_path: Path) -> None:
    """Required keys are asked for by name, even if their whole table is missing."""
    with pytest.raises(ConfigError, match=r"env\.factory is missing"):
        _load(tmp_path, RECIPE.replace('[env]\nfactory = "env.py:Guess"\nlimit = 5\n', ""))
    with pytest.raises(ConfigError, match=r"optimizer\.lr is missing"):
        _load(tmp_path, RECIPE.replace("lr = 1e-3", ""))


def test_a_value_where_a_section_belongs_is_refused(tmp_path: Path) -> None:
    """``budget = 5`` is no table."""
    with pytest.raises(ConfigError, match="budget is 5, but must be a table"):
        _load(tmp_path, "budget = 5\n" + RECIPE)


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    """Missing files and broken TOML are the user's to mend; the message has the file and the place."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        load_recipe(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"recipe\.toml: is not TOML: .*line 1"):
        _load(tmp_path, "steps = = 2")


def test_the_servers_key_stays_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe names a variable; the key is read when it is used and is in no value that could be written."""
    recipe = _load(tmp_path, RECIPE, "sampler.api_key_env=ASYNCRL_TEST_KEY")
    monkeypatch.setenv("ASYNCRL_TEST_KEY", "hush")
    assert recipe.sampler.api_key() == "hush"
    assert "hush" not in repr(recipe)
    monkeypatch.delenv("ASYNCRL_TEST_KEY")
    with pytest.raises(ConfigError, match=r"sampler\.api_key_env is 'ASYNCRL_TEST_KEY'"):
        recipe.sampler.api_key()


def test_models_are_cached_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """``XDG_CACHE_HOME`` if it is set, else ``~/.cache``."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/asyncrl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache/asyncrl"


def test_every_key_of_the_servers_is_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are read from the environment, and known to whoever writes logs."""
    monkeypatch.setenv("ASYNCRL_TEST_KEY", "hush")
    monkeypatch.setenv("ASYNCRL_ADMIN_KEY", "quiet")
    sampler = _load(
        tmp_path,
        RECIPE,
        "sampler.backend=sglang",
        "sampler.urls=['http://a']",
        "sampler.api_key_env=ASYNCRL_TEST_KEY",
        "sampler.admin_key_env=ASYNCRL_ADMIN_KEY",
    ).sampler
    assert (sampler.api_key(), sampler.admin_key()) == ("hush", "quiet")
    assert sampler.secrets() == ["hush", "quiet"]


def test_servers_get_the_options_of_their_kind(tmp_path: Path) -> None:
    """Those of the client for servers that are named, those of a server for servers that the run starts."""
    named = ("sampler.backend=sglang", "sampler.urls=['http://a']", "sampler.retries=7", "sampler.allow_version=true")
    client = _load(tmp_path, RECIPE, *named).client
    assert (client["retries"], client["allow_version"]) == (7, True)
    started = ("sampler.backend=sglang", "sampler.memory_fraction=0.5", "sampler.python=bin/python")
    launched = _load(tmp_path, RECIPE, *started).launched
    assert (launched["memory_fraction"], launched["python"]) == (0.5, Path("bin/python"))
