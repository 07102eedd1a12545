"""``asyncrl train``: stopping, going on, and what it says about a folder that has a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import asyncrl as rl
from asyncrl.cli.main import main
from asyncrl.recipe import compose as composition
from asyncrl.recipe.compose import ComposedRun, _checkpointing
from asyncrl.recipe.config import Recipe
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ByteRenderer, ScriptedSampler, scripted_policy
from asyncrl.types import Message, Row

RECIPE = """
[model]
path = "."
[env]
factory = "env.py:Env"
[data]
train = "env.py:rows"
[trainer]
steps = 6
groups_per_step = 2
group_size = 2
max_staleness = 1
[optimizer]
lr = 1e-3
[checkpoint]
rollout_every = 0.05
"""


class _OneTurn(rl.Env):
    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "?"}]

    async def reward(self, traj: rl.Trajectory, row: Row) -> float:
        return float(traj.member)


class _Command:
    """The command on scripted parts, in a folder of its own."""

    def __init__(self, directory: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self.run = directory / "run"
        self.stop_at: int | None = None
        """Version under whose first request the process gets SIGTERM."""
        self._capture = capture
        (directory / "recipe.toml").write_text(RECIPE, encoding="utf-8")

    def compose(self, recipe: Recipe, *, directory: Path | None = None) -> ComposedRun:
        engine = rl.RolloutEngine(
            scripted_policy(sampler=ScriptedSampler(tokens=self._sample)), env=_OneTurn, renderer=ByteRenderer()
        )
        trainer = rl.AsyncTrainer(
            engine=engine,
            optimizer=recipe.trainer["optimizer"],
            groups_per_step=2,
            group_size=2,
            max_staleness=recipe.trainer["max_staleness"],
            checkpointing=_checkpointing(recipe, directory),
        )
        return ComposedRun(trainer=trainer, engine=engine, evaluator=None, rows=[0, 1, 2], steps=recipe.steps)

    def _sample(self, request: SegmentRequest) -> Sequence[int]:
        if request.version == self.stop_at:
            self.stop_at = None
            os.kill(os.getpid(), signal.SIGTERM)
        return [65, END]

    def train(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, result and what stderr says."""
        code = main(["train", str(self.directory / "recipe.toml"), *arguments])
        captured = self._capture.readouterr()
        return code, json.loads(captured.out or "{}"), captured.err


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> _Command:
    """A recipe whose parts are scripted."""
    made = _Command(tmp_path, capsys)
    monkeypatch.setattr(composition, "compose", made.compose)
    return made


def test_a_stopped_run_goes_on(command: _Command) -> None:
    """The first signal saves and exits with 0; ``--resume`` takes the steps that are left; the result is of both."""
    command.stop_at = 2
    code, result, errors = command.train("--run-dir", str(command.run))
    assert (code, result["stopped"]) == (0, True)
    assert 1 <= result["steps"] < 6
    assert "SIGTERM: stopping" in errors
    code, result, errors = command.train("--resume", str(command.run))
    assert (code, result["steps"], "stopped" in result) == (0, 6, False)
    assert "resumed" in errors
    lines = (command.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["n"] for line in lines] == [1, 2, 3, 4, 5, 6]
    run = json.loads((command.run / "run.json").read_text(encoding="utf-8"))
    assert (run["configuration"]["trainer"]["steps"], run["plan"]["max_staleness"]) == (6, 1)


def test_a_folder_with_a_run_says_how_to_go_on(command: _Command) -> None:
    """A second run does not write into the files of the first."""
    command.train("--run-dir", str(command.run))
    code, _, errors = command.train("--run-dir", str(command.run))
    assert code == 2
    assert f"--resume {command.run}" in errors


def test_a_changed_recipe_is_refused(command: _Command) -> None:
    """With the field and both values; more steps are no change."""
    command.train("--run-dir", str(command.run))
    code, _, errors = command.train("--resume", str(command.run), "--set", "trainer.max_staleness=2")
    assert code == 2
    assert "max_staleness is 2, but was 1" in errors
    code, result, _ = command.train("--resume", str(command.run), "--set", "trainer.steps=8")
    assert (code, result["steps"]) == (0, 8)


@pytest.mark.parametrize("left", ["metrics.jsonl", "events.jsonl", "state", "journal", "weights"])
def test_a_new_run_does_not_begin_among_the_files_of_another(command: _Command, left: str) -> None:
    """Whichever of them is left; nothing is changed."""
    (command.run / left).mkdir(parents=True)
    code, _, errors = command.train("--run-dir", str(command.run))
    assert code == 2
    assert f"has the files of another run ({left}): use another folder" in errors
    assert [path.name for path in command.run.iterdir()] == [left]


def test_a_line_of_results_that_cannot_be_read_is_said(command: _Command) -> None:
    """The run goes on, and the summary is of the lines that can be read."""
    command.stop_at = 3
    command.train("--run-dir", str(command.run))
    path = command.run / "metrics.jsonl"
    path.write_bytes(b"{" + path.read_bytes())
    code, result, errors = command.train("--resume", str(command.run))
    assert (code, result["steps"]) == (0, 5)
    assert "line_unreadable" in errors
    assert str(path) in errors


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "events.jsonl", "state", "journal", "weights"])
@pytest.mark.parametrize("harm", ["emptied", "a folder", "a file"])
def test_a_damaged_directory_is_refused_in_one_line(command: _Command, name: str, harm: str) -> None:
    """With the path, and never with a traceback; or the run goes on as if nothing had happened."""
    command.stop_at = 3
    command.train("--run-dir", str(command.run))
    path = command.run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if harm == "a folder":
        path.mkdir()
    else:
        path.write_bytes(b"" if harm == "emptied" else b"0")
    code, _, errors = command.train("--resume", str(command.run))
    results = name in ("metrics.jsonl", "events.jsonl")
    harmless = harm != "a folder" if results else (name, harm) == ("state", "a folder")
    assert code == (0 if harmless else 1), errors
    if not harmless:
        assert str(command.run) in errors
        assert "CheckpointError" in errors
    assert "Traceback" not in errors


def test_a_folder_without_a_run_cannot_be_resumed(command: _Command) -> None:
    """A wrong path is not taken for a fresh start."""
    code, _, errors = command.train("--resume", str(command.run))
    assert code == 2
    assert "there is no run.json in it" in errors
    assert not command.run.exists()
    code, _, errors = command.train("--resume", str(command.run), "--set", "checkpoint.enabled=false")
    assert "checkpoint.enabled is False" in errors


@pytest.mark.parametrize(
    "assignment", ["checkpoint.weights_every=0", "checkpoint.rollout_every=-1", "checkpoint.evry=3"]
)
def test_the_section_is_checked(command: _Command, assignment: str) -> None:
    """By key."""
    code, _, errors = command.train("--set", assignment)
    assert code == 2
    assert assignment.partition("=")[0].partition(".")[2] in errors
