"""From a run to a model and back: versions of a run, exports that others load, and runs that start from them."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.main import main
from asyncrl.errors import ConfigError
from asyncrl.recipe.trained import base_name, find_trained

ENV = """
import asyncrl as rl

class Letters(rl.Env):
    async def reset(self, row):
        return [{"role": "user", "content": "a" + row["letter"]}]

    async def reward(self, traj, row):
        traj.metrics["vowels"] = float(sum(traj.final_text.count(v) for v in "aeiou"))
        return traj.final_text.count(row["letter"]) + 0.1 * traj.member

    async def on_truncated(self, traj, row, cause):
        return await self.reward(traj, row)

def rows():
    return [{"letter": letter} for letter in "abcd"]
"""
RECIPE = """
[model]
path = "{model}"
threads = 1
{lora}
[env]
factory = "env.py:Letters"
[data]
train = "env.py:rows"
heldout = "env.py:rows"
[rollout]
renderer = "text"
{rollout}
[budget]
max_turns = 1
max_generated_tokens = 4
[truncation]
train = "reward"
[trainer]
steps = 2
groups_per_step = 2
group_size = 4
[optimizer]
lr = 1e-2
[evaluation]
group_size = 3
temperature = 0.0
pass_reward = 0.5
"""
LORA = "lora = { r = 4, alpha = 8 }"
SEGMENT = 'sampling_policy = "segment"\nkv_cache = { on_limit = "refill", allow_reprefill = true }'


def write_recipe(folder: Path, model: Path, *, lora: bool) -> Path:
    """A recipe of a tiny model and its environment, in a new folder."""
    folder.mkdir()
    (folder / "env.py").write_text(ENV, encoding="utf-8")
    recipe = folder / "recipe.toml"
    text = RECIPE.format(model=model, lora=LORA if lora else "", rollout="" if lora else SEGMENT)
    recipe.write_text(text, encoding="utf-8")
    return recipe


def _run(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Any:
    """The last line of stdout as JSON; of a command that is refused, stderr."""
    found = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return json.loads(captured.out.splitlines()[-1]) if code == 0 else captured.err


def _logprobs(model: Any) -> Any:
    """Of a few tokens, by plain transformers."""
    import torch

    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits.float(), -1)


def _own_logprobs(folder: Path, model: Path, *, adapter: bool) -> Any:
    """The same by the learner, which has loaded ``folder``."""
    import torch

    from asyncrl.learning.adapterfolder import read_adapter
    from asyncrl.learning.torch_model import TorchModel

    lora = read_adapter(folder, None) if adapter else None
    own = TorchModel(
        model,
        lora=lora,
        dtype="float32",
        device="cpu",
        threads=None,
        micro_batch_tokens=4096,
        gradient_checkpointing=False,
        seed=0,
    )
    own.load_exported(folder)
    with torch.no_grad():
        return torch.log_softmax(own._causal(torch.arange(3, 20)[None]).logits.float(), -1)


def _require_public(folder: Path, private: Path) -> None:
    """Nothing in ``folder`` names a path of this machine, and anybody may read it."""
    for path in folder.rglob("*"):
        if path.is_file():
            assert str(private).encode() not in path.read_bytes(), path
            assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444, path


@pytest.mark.slow
@pytest.mark.timeout(900)  # four commands, each with a server of its own
@pytest.mark.parametrize("lora", [True, False])
def test_a_run_is_evaluated_exported_loaded_and_continued(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], lora: bool
) -> None:
    """Each step with what the one before it has left; every log-probability is the same."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model("qwen3")
    recipe = write_recipe(tmp_path / "task", model, lora=lora)
    run, out = tmp_path / "run", tmp_path / "out"
    assert _run(capsys, "train", recipe, "--run-dir", run)["steps"] == 2

    measured = _run(capsys, "eval", run)
    assert measured["version"] == 2
    assert {"pass@1", "pass@2", "pass@3", "reward_ci95", "rollout/vowels_mean", "failed_rows"} <= set(measured)

    exported = _run(capsys, "export", run, out)
    kind = {"kind": "adapter", "base_model": str(model)} if lora else {"kind": "model"}
    assert exported == {"out": str(out), **kind, "version": 2}
    _require_public(out, tmp_path)
    assert "max staleness" not in (card := (out / "README.md").read_text())
    assert "| recipe | task/recipe.toml |" in card
    assert "| steps | 2 |" in card
    assert AutoTokenizer.from_pretrained(out)("abc").input_ids == AutoTokenizer.from_pretrained(model)("abc").input_ids

    own = _own_logprobs(out, model, adapter=lora)
    found = find_trained(run, None, key="RUN")
    assert torch.equal(own, _own_logprobs(found.folder, model, adapter=lora))
    merged = tmp_path / "merged"
    assert _run(capsys, "export", run, merged, "--merged")["kind"] == "model"
    _require_public(merged, tmp_path)
    assert torch.allclose(own, _logprobs(AutoModelForCausalLM.from_pretrained(merged)), atol=1e-5)
    if lora:
        from peft import PeftModel

        base: Any = AutoModelForCausalLM.from_pretrained(model)
        assert torch.allclose(own, _logprobs(PeftModel.from_pretrained(base, str(out))), atol=1e-5)
    else:
        assert torch.allclose(own, _logprobs(AutoModelForCausalLM.from_pretrained(out)), atol=1e-5)

    # Greedy answers of the run and of one that starts from its export are the same.
    second = tmp_path / "second"
    _run(capsys, "train", recipe, "--from", out, "--run-dir", second)
    first = [json.loads(line) for line in (second / "events.jsonl").read_text().splitlines() if "evaluation_f" in line]
    assert round(first[0]["metrics"]["reward_mean"], 4) == measured["reward_mean"]
    assert (second / "start").is_dir() is lora  # an adapter is copied


def _version(run: Path, number: int) -> None:
    folder = run / "adapters" / f"v{number:06d}"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')


def test_the_newest_version_is_found_or_the_one_that_is_wanted(tmp_path: Path) -> None:
    """One that the run has no more is refused, with those that it has; a draft and a file are no versions."""
    run = tmp_path / "run"
    _version(run, 4)
    _version(run, 12)
    (run / "run.json").touch()
    (run / "adapters" / "v000020").mkdir()
    (run / "adapters" / ".v000021.partial").mkdir()
    assert find_trained(run, None, key="RUN").version == 12
    assert find_trained(run, 4, key="RUN").folder.name == "v000004"
    with pytest.raises(ConfigError, match=r"--version is 5, .* still has: 4, 12"):
        find_trained(run, 5, key="RUN")
    with pytest.raises(ConfigError, match=r"--version is 1, .* left out"):
        find_trained(run / "adapters" / "v000004", 1, key="RUN")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("export", "{empty}", "{out}"), "RUN"),
        (("export", "{empty}/nowhere", "{out}"), "RUN"),
        (("eval", "{empty}"), "RUN|WEIGHTS|RECIPE"),
        (("eval", "{adapter}"), "name the recipe after it"),
        (("eval", "{recipe}", "{recipe}"), "left out"),
        (("eval", "{recipe}", "--version", "3"), "--version"),
        (("train", "{recipe}", "--from", "{empty}"), "--from"),
        (("train", "{recipe}", "--version", "1"), "--version"),
        (("train", "{recipe}", "--from", "{adapter}", "--version", "1"), "--version"),
        (("train", "{recipe}", "--from", "{adapter}", "--set", "model.lora.r=2"), "lora.r is 2"),
        (("train", "{recipe}", "--from", "{dora}"), "plain LoRA"),
    ],
)
def test_what_cannot_be_started_from_is_refused(
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    """Before anything starts, by the option."""
    places = {name: tmp_path / name for name in ("empty", "adapter", "dora", "out")}
    recipe = write_recipe(tmp_path / "task", tiny_model("qwen3"), lora=True)
    for name in ("empty", "adapter", "dora"):
        places[name].mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (places["adapter"] / "adapter_config.json").write_text(json.dumps(config))
    (places["dora"] / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    given = [argument.format(**places, recipe=recipe) for argument in arguments]
    run = ["--run-dir", str(tmp_path / "run")] if given[0] == "train" else []
    assert said in _run(capsys, *given, *run, code=2)


def test_an_export_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with files is refused."""
    _version(tmp_path / "run", 1)
    (tmp_path / "run" / "run.json").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert "OUT is" in _run(capsys, "export", tmp_path / "run", tmp_path / "out", code=2)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models/smol", "smol"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/abc", "Qwen/Qwen3-0.6B"),
        ("hub/models--gpt2/snapshots/abc", "gpt2"),
    ],
)
def test_a_model_is_called_as_others_call_it(tmp_path: Path, folder: str, name: str) -> None:
    """By its name on the hub if it is from there, and never by a path."""
    assert base_name(tmp_path / folder) == name
