"""Choosing how versions are published: what is refused, what a recipe can say, what is left at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.events import Events
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.lora import LoraPublisher
from asyncrl.recipe.compose import compose
from asyncrl.recipe.config import load_recipe
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.server import ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, read_theta, write_theta
from tests.modelfolder import write_model

URL = "http://127.0.0.1:30001"


def _policy(server: ScriptedServer, model: Path, *, lora_rank: int | None = None, **options: Any) -> rl.Policy:
    (model / "config.json").write_text('{"vocab_size": 256}')
    learner = ThetaLearner(theta=0.5, lora_rank=lora_rank)
    learner.model_path = model
    return rl.Policy(learner, sampler=SGLang([URL], transport=network({URL: server})), **options)


@pytest.mark.parametrize(
    ("lora_rank", "options", "message"),
    [
        (
            8,
            {"publication": "distributed"},
            r"publication\.method is 'distributed'.*LoRA adapter: use 'disk' or 'tensors'",
        ),
        (None, {"publication": "nfs"}, r"publication\.method is 'nfs', but must be one of 'disk', 'tensors'"),
        (None, {"pause_mode": "stop"}, r"publication\.pause_mode is 'stop'"),
        (None, {"bucket_bytes": 0}, r"publication\.bucket_bytes is 0"),
        (None, {"probe_tolerance": 0.0}, r"publication\.probe_tolerance is 0\.0"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(
    tmp_path: Path, lora_rank: int | None, options: dict[str, Any], message: str
) -> None:
    """Before anything is loaded or connected."""
    with pytest.raises(ConfigError, match=message):
        _policy(ScriptedServer(), tmp_path, lora_rank=lora_rank, **options)


def test_the_embedded_server_takes_no_tensors() -> None:
    """They come pickled, and nothing of ours unpickles."""
    with pytest.raises(ConfigError, match=r"publication\.method is 'tensors', which the embedded server does not take"):
        rl.Policy(ThetaLearner(lora_rank=None), publication="tensors")


@pytest.mark.parametrize(
    ("lora_rank", "way", "route"),
    [
        (8, "disk", "/load_lora_adapter"),
        (8, "tensors", "/load_lora_adapter_from_tensors"),
        (None, "disk", "/update_weights_from_disk"),
        (None, "tensors", "/update_weights_from_tensor"),
    ],
)
async def test_the_way_that_was_chosen_is_taken_and_the_result_is_left(
    tmp_path: Path, lora_rank: int | None, way: Any, route: str
) -> None:
    """One route each, and whoever sends tensors has the newest version on disk too, at the end."""
    server = ScriptedServer()
    directory = tmp_path / "published"
    policy = _policy(server, tmp_path, lora_rank=lora_rank, publication=way, directory=directory)
    async with policy.opened(Events()) as opened:
        assert isinstance(opened.publisher, FullPublisher if lora_rank is None else LoraPublisher)
        for version in range(3):
            await opened.publisher.stage(version)
            await opened.publisher.publish(version)
        assert (directory / "v000002").exists() is (way == "disk")
    loads = {called for called, _ in server.calls if called.startswith(("/load_lora", "/update_weights"))}
    assert loads == {route}
    assert read_theta(directory / "v000002") == 0.5


async def _life(policy: rl.Policy, versions: int, *, versions_in: Path | None = None) -> None:
    async with policy.opened(Events(), versions_in=versions_in) as opened:
        for version in range(versions):
            await opened.publisher.stage(version)
            await opened.publisher.publish(version)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("lora_rank", [8, None])
async def test_a_run_that_is_resumed_sweeps_what_it_has_left_and_nothing_else(
    tmp_path: Path, lora_rank: int | None
) -> None:
    """Folders and half-written ones of the killed process, and its adapters on the servers; other runs keep theirs."""
    server = ScriptedServer()
    first, second = tmp_path / "one", tmp_path / "two"
    names: dict[Path, str] = {}
    for home in (first, second):
        policy = _policy(server, tmp_path, lora_rank=lora_rank)
        async with policy.opened(Events(), versions_in=home) as opened:
            for version in range(3):
                await opened.publisher.stage(version)
                await opened.publisher.publish(version)
            names[home] = max(server.adapters, default="")
        for left in ("v000007", ".v000008.partial"):
            (home / left).mkdir()
    if lora_rank is not None:
        # As after a kill, which unloads nothing.
        server.adapters = dict.fromkeys([*names.values(), "mine"], first / "v000002")
    policy = _policy(server, tmp_path, lora_rank=lora_rank)
    await _life(policy, 1, versions_in=first)
    assert _names(first) == ["run-id", "v000000"]
    assert {"v000007", "v000002"} < set(_names(second))
    assert not (first / ".v000008.partial").exists() and (second / ".v000008.partial").exists()
    if lora_rank is not None:
        assert set(server.adapters) == {"mine", names[second]}


async def test_results_of_an_earlier_run_stay_where_no_run_is_resumed(tmp_path: Path) -> None:
    """A folder that was named by hand has what was trained before."""
    directory = tmp_path / "published"
    for versions in (3, 1):
        await _life(_policy(ScriptedServer(), tmp_path, lora_rank=8, directory=directory), versions)
    assert {"v000000", "v000002"} <= set(_names(directory))


async def test_adapters_are_unloaded_when_their_run_ends(tmp_path: Path) -> None:
    """Servers of somebody else's go on, and would keep them for ever; what was theirs before stays."""
    server = ScriptedServer()
    (tmp_path / "a").mkdir()
    write_theta(tmp_path / "a", 1.0)
    server.adapters = {"mine": tmp_path / "a"}
    await _life(_policy(server, tmp_path, lora_rank=8), 4)
    assert set(server.adapters) == {"mine"}


async def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    """Servers read versions by the folder's name."""
    options: dict[str, Any] = {"lora_rank": 8, "directory": tmp_path / "published"}
    async with _policy(ScriptedServer(), tmp_path, **options).opened(Events()):
        with pytest.raises(ConfigError, match=r"policy\.directory is .*published"):
            await _life(_policy(ScriptedServer(), tmp_path, **options), 1)


RECIPE = """
[model]
path = "."
[env]
factory = "env.py:Guess"
[data]
train = "env.py:rows"
[trainer]
steps = 1
groups_per_step = 2
max_staleness = 0
[sampler]
backend = "sglang"
urls = ["http://127.0.0.1:30001"]
[publication]
method = "tensors"
pause_mode = "abort"
bucket_bytes = 1000
probe_tolerance = 0.25
[optimizer]
lr = 1e-3
"""


def test_a_recipe_says_all_of_it(tmp_path: Path) -> None:
    """The keys of ``[publication]`` are those of ``Policy``."""
    write_model(tmp_path, '{"vocab_size": 256}')
    (tmp_path / "env.py").write_text(
        "import asyncrl as rl\nclass Guess(rl.Env):\n    reset = reward = None\ndef rows(): return [1]\n",
        encoding="utf-8",
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    policy = compose(load_recipe(recipe)).engine.policy
    chosen = policy._publishing
    assert (chosen.method, chosen.pause_mode, chosen.bucket_bytes, chosen.probe_tolerance) == (
        "tensors",
        "abort",
        1000,
        0.25,
    )
    with pytest.raises(ConfigError, match=r"publication: unknown key 'mode'"):
        load_recipe(recipe, ["publication.mode=disk"])
