"""``rl.run`` and ``asyncrl train script.py``: a script's run is kept, shown, stopped and resumed like a recipe's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import asyncrl as rl
from asyncrl.cli.main import main
from asyncrl.errors import ConfigError
from asyncrl.recipe.scripts import compose_script

SCRIPT = """
import asyncrl as rl
from asyncrl.testing.scripted import ByteRenderer, ScriptedSampler, scripted_policy
from letters import Letters

if __name__ == "__main__":
    sampler = ScriptedSampler(seconds=lambda request: {seconds})
    engine = rl.RolloutEngine(scripted_policy(sampler=sampler), env=Letters, renderer=ByteRenderer())
    trainer = rl.AsyncTrainer(engine=engine, optimizer=rl.Adam(lr=1e-3), groups_per_step=2, group_size=2)
    {before}
    steps = rl.run(trainer, [{{"letter": "A"}}] * 4, steps={steps}{options})
    print("after", len(steps))
"""
LETTERS = """
import asyncrl as rl

class Letters(rl.Env):
    async def reset(self, row):
        return [{"role": "user", "content": "?"}]

    async def reward(self, traj, row):
        return float(traj.member)
"""


def write_script(
    folder: Path, *, steps: int = 3, before: str = "pass", options: str = "", seconds: float = 0.0
) -> Path:
    """A script with a scripted policy, and its environment beside it."""
    (folder / "letters.py").write_text(LETTERS, encoding="utf-8")
    script = folder / "train.py"
    text = SCRIPT.format(steps=steps, before=before, options=options, seconds=seconds)
    script.write_text(text, encoding="utf-8")
    return script


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the commands run. The module beside one script is not that beside the next."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "letters", raising=False)
    return tmp_path


def test_a_script_is_trained_like_a_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script goes on after its run, and the command prints the result line after that."""
    assert main(["train", str(write_script(here)), "--run-dir", "first"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "after 3"
    assert json.loads(out[1])["steps"] == 3
    assert (here / "first" / "metrics.jsonl").read_text().count("\n") == 3
    assert json.loads((here / "first" / "run.json").read_text())["origin"]["path"].endswith("train.py")


def test_a_script_is_resumed_like_a_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More steps of the same run; the result counts those of both processes."""
    assert main(["train", str(write_script(here, steps=2)), "--run-dir", "first"]) == 0
    assert main(["train", str(write_script(here, steps=5)), "--resume", "first"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 5
    assert main(["train", str(write_script(here, steps=5)), "--run-dir", "first"]) == 2
    assert "--resume first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "never called rl.run"),
        ("x = 1\n1 / 0\n", "ZeroDivisionError: division by zero ({script}:2"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name' ({script}:1"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit('not today')\n", "not today"),
    ],
    ids=["no run", "raises", "import", "syntax", "exit"],
)
def test_a_script_that_asks_for_no_run_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    """With what it did, and the place in it."""
    script = here / "train.py"
    script.write_text(text, encoding="utf-8")
    assert main(["train", str(script)]) == 2
    assert said.format(script=script) in capsys.readouterr().err.replace(", line ", ":")
    assert not (here / "runs").exists()


def test_what_a_script_cannot_take_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Overrides are a recipe's; a script that is not there is named; a second run is one too many."""
    script = write_script(here)
    assert main(["train", str(script), "--set", "trainer.steps=1"]) == 2
    assert "--set" in capsys.readouterr().err
    assert main(["train", "nowhere.py"]) == 2
    assert "nowhere.py" in capsys.readouterr().err
    twice = write_script(here, before='rl.run(trainer, [{"letter": "B"}], steps=1)')
    assert main(["train", str(twice), "--run-dir", "first"]) == 1
    assert "more than once" in capsys.readouterr().err


def test_a_script_is_composed_without_running(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it hands to rl.run is there to be checked or evaluated; what it does afterwards is not done."""
    composed = compose_script(write_script(here))
    assert (composed.steps, len(composed.rows)) == (3, 4)
    assert composed.engine is composed.trainer.engine
    assert capsys.readouterr().out == ""
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_a_script_by_itself_keeps_its_run(here: Path) -> None:
    """In a new folder whose name it says first, with progress on stderr; ``run_dir`` names one, and goes on with it."""
    done = _python(write_script(here))
    assert done.returncode == 0, done.stderr
    [folder] = (here / "runs").iterdir()
    assert f"the run is kept in runs/{folder.name}" in done.stderr.splitlines()[0]
    assert "step_finished" in done.stderr
    for steps, after in ((2, 2), (5, 3)):
        done = _python(write_script(here, steps=steps, options=', run_dir="mine"'))
        assert done.stdout == f"after {after}\n"
    assert (here / "mine" / "metrics.jsonl").read_text().count("\n") == 5


@pytest.mark.slow
def test_a_script_that_keeps_nothing_says_so(here: Path) -> None:
    """On its first line."""
    done = _python(write_script(here, options=", keep=False"))
    assert "nothing of this run is kept" in done.stderr.splitlines()[0]
    assert not (here / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("by_command", [False, True])
def test_ctrl_c_ends_a_script_in_order(here: Path, by_command: bool) -> None:
    """Exit code 0, no traceback, nothing after the run, and the run can go on."""
    script = write_script(here, steps=10_000, options=', run_dir="mine"', seconds=0.01)
    command = [sys.executable, *(("-m", "asyncrl", "train") if by_command else ()), str(script)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "step_finished" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert "after" not in out
    assert (here / "mine" / "state").is_dir()


@pytest.mark.slow
def test_where_a_run_is_kept_is_said_once(here: Path) -> None:
    """Two folders, or a folder and ``keep=False``, contradict each other."""
    for options, said in (
        (', run_dir="a", keep=False', "keep is False"),
        (', log="loud"', "log is 'loud'"),
    ):
        done = _python(write_script(here, options=options))
        assert said in done.stderr
    kept = "trainer = __import__('dataclasses').replace(trainer, checkpointing=rl.Checkpointing('b'))"
    assert (
        "checkpointing keeps the run in 'b'" in _python(write_script(here, before=kept, options=', run_dir="a"')).stderr
    )


async def test_rl_run_is_refused_where_a_loop_runs() -> None:
    """It says what to write instead."""
    with pytest.raises(ConfigError, match="async for step"):
        rl.run(None, [1], steps=1)  # type: ignore[arg-type]


def _python(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=120)
