from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import asyncrl
import asyncrl as rl
from asyncrl.cli.main import main
from asyncrl.errors import ConfigError
from asyncrl.events import EvaluationFinished, Event, StepFinished
from asyncrl.observe.rollouts import read_rollouts
from asyncrl.observe.runfiles import read_run
from asyncrl.observe.summary import RunSummary
from asyncrl.recipe import compose as composition
from asyncrl.recipe.compose import ComposedRun
from asyncrl.recipe.config import Recipe
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing.scripted import END, ByteRenderer, ScriptedLearner, ScriptedSampler, scripted_policy
from asyncrl.types import Message, Row
from tests.modelfolder import write_model

RECIPE = """
[model]
path = "."
[env]
factory = "env.py:Env"
[data]
train = "env.py:rows"
[trainer]
steps = 5
groups_per_step = 2
group_size = 2
[optimizer]
lr = 1e-3
"""


class OneTurn(rl.Env):
    """Asks once. An answer that version 0 does not write is worth 1, being the second member of a group a half."""

    async def reset(self, row: Row) -> list[Message]:
        """The question."""
        return [{"role": "user", "content": "?"}]

    async def reward(self, traj: rl.Trajectory, row: Row) -> float:
        """Members differ, so that there is always a gradient; later versions write later letters than A."""
        return traj.member / 2 + float(traj.final_text != "AAA")


@dataclass
class _Case:
    """A recipe on disk whose composition is replaced by scripted parts."""

    directory: Path
    capture: pytest.CaptureFixture[str]
    sample: Callable[[SegmentRequest], Sequence[int]] | None = None
    seconds: Callable[[SegmentRequest], float] = lambda request: 0.0
    heldout: Sequence[Row] = ()
    recipes: list[Recipe] = field(default_factory=list)

    def compose(self, recipe: Recipe, *, directory: Path | None = None) -> ComposedRun:
        """What ``compose`` would do with the scripted policy."""
        self.recipes.append(recipe)
        policy = scripted_policy(sampler=ScriptedSampler(tokens=self.sample, seconds=self.seconds))
        engine = rl.RolloutEngine(policy, env=OneTurn, renderer=ByteRenderer())
        evaluator = rl.Evaluator(rows=self.heldout) if self.heldout else None
        trainer = rl.AsyncTrainer(
            engine=engine, optimizer=recipe.trainer["optimizer"], groups_per_step=2, group_size=2, evaluator=evaluator
        )
        return ComposedRun(trainer=trainer, engine=engine, evaluator=evaluator, rows=[0, 1, 2], steps=recipe.steps)

    def run(self, command: str, *arguments: str) -> tuple[int, list[str], str]:
        """Exit code, lines of stdout, stderr."""
        code = main([command, str(self.directory / "recipe.toml"), *arguments])
        captured = self.capture.readouterr()
        return code, captured.out.splitlines(), captured.err

    def train(self, *arguments: str) -> tuple[int, list[str], str]:
        """``asyncrl train`` into the folder ``run``."""
        return self.run("train", "--run-dir", str(self.directory / "run"), *arguments)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> _Case:
    """A scripted run that takes no time."""
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    case = _Case(directory=tmp_path, capture=capsys)
    monkeypatch.setattr(composition, "compose", case.compose)
    return case


def _event(reward: float, age: float) -> StepFinished:
    return StepFinished(time=0.0, n=1, model_step=1, metrics={"reward/mean": reward, "staleness/span_age_max": age})


def test_the_summary_compares_the_first_and_last_fifth() -> None:
    """Of 10 steps the first two with the last two; the age is the largest of all."""
    outcome = RunSummary()
    for step in range(10):
        outcome.observe(_event(float(step), age=2.0 if step == 5 else 0.0))
    outcome.observe(EvaluationFinished(time=0.0, version=0, metrics={"reward_mean": 0.25}))
    outcome.observe(EvaluationFinished(time=0.0, version=9, metrics={"reward_mean": 0.75}))
    assert outcome.summary() == {
        "steps": 10,
        "versions": 1,
        "max_age": 2,
        "reward_first": 0.5,
        "reward_last": 8.5,
        "heldout_first": 0.25,
        "heldout_last": 0.75,
    }


def test_a_summary_without_a_step_claims_no_reward() -> None:
    """A run that was stopped early has nothing to compare."""
    assert RunSummary().summary() == {"steps": 0, "versions": 0, "max_age": 0}


def test_training_prints_one_line_and_leaves_its_files(case: _Case) -> None:
    """stdout is for programs, stderr for people, the folder for both."""
    case.heldout = [7]
    code, lines, errors = case.train()
    assert code == 0
    [line] = lines
    result = json.loads(line)
    assert result.keys() == {
        "steps",
        "versions",
        "max_age",
        "reward_first",
        "reward_last",
        "heldout_first",
        "heldout_last",
        "run_dir",
        "seconds",
    }
    assert (result["steps"], result["run_dir"]) == (5, str(case.directory / "run"))
    assert (result["heldout_first"], result["heldout_last"]) == (0.25, 1.25)
    assert errors.splitlines()[0].startswith("asyncrl: loading ")
    assert errors.count("step_finished") == 5
    metrics = (case.directory / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(step)["n"] for step in metrics] == [1, 2, 3, 4, 5]
    run = json.loads((case.directory / "run/run.json").read_text(encoding="utf-8"))
    assert run["configuration"]["trainer"]["steps"] == 5


def test_training_keeps_what_was_said(case: _Case) -> None:
    """As much of it as ``[run]`` wants, of steps and evaluations."""
    case.heldout = [7]
    assert case.train("--set", "run.rollouts=1", "--set", "run.rollout_tokens=true")[0] == 0
    files = list(read_rollouts(case.directory / "run"))
    assert [file.n for file in files] == [0, 1, 2, 3, 4, 5, 5]
    assert [len(file.trajectories) for file in files] == [1] * 7
    assert files[1].trajectories[0]["tokens"][-1] == END


def test_overrides_reach_the_run_and_its_file(case: _Case) -> None:
    """``--set`` changes what is run, and what is written down as run."""
    code, lines, _ = case.train("--set", "trainer.steps=2", "--set", "run.log=json")
    assert code == 0
    assert json.loads(lines[0])["steps"] == 2
    run = json.loads((case.directory / "run/run.json").read_text(encoding="utf-8"))
    assert run["configuration"]["trainer"]["steps"] == 2


def test_a_run_gets_a_folder_of_its_own(case: _Case) -> None:
    """Two runs of a recipe do not write into each other's files."""
    folders = set()
    for _ in range(2):
        code, lines, _ = case.run("train", "--set", f"run.directory='{case.directory / 'runs'}'")
        assert code == 0
        folders.add(json.loads(lines[0])["run_dir"])
    assert len(folders) == 2
    assert {str(folder) for folder in (case.directory / "runs").iterdir()} == folders


def test_the_folder_of_another_run_is_refused(case: _Case) -> None:
    """A second run never mixes its lines into the first one's."""
    assert case.train()[0] == 0
    code, lines, errors = case.train()
    assert (code, lines) == (2, [])
    assert "--run-dir" in errors


def test_a_wrong_recipe_is_exit_code_2_without_a_traceback(case: _Case) -> None:
    """The message is one line, and nothing was composed."""
    code, lines, errors = case.train("--set", "trainer.stesp=3")
    assert (code, lines, case.recipes) == (2, [], [])
    assert "unknown key 'stesp'; did you mean 'steps'?" in errors
    assert "Traceback" not in errors
    assert not (case.directory / "run").exists()


def test_a_failing_run_is_exit_code_1_with_its_first_error(case: _Case) -> None:
    """No traceback unless asked for; the events up to the failure are on disk."""

    def fail(request: SegmentRequest) -> Sequence[int]:
        error = LookupError("the sampler is gone")
        error.add_note("its last words")
        raise error

    case.sample = fail
    code, lines, errors = case.train()
    assert (code, lines) == (1, [])
    assert "asyncrl: failed: LookupError: the sampler is gone\n" in errors
    assert "\nits last words\n" in errors
    assert "Traceback" not in errors
    assert "member_failed" in (case.directory / "run/events.jsonl").read_text(encoding="utf-8")
    ended = read_run(case.directory / "run").ended
    assert ended is not None
    assert (ended["reason"], ended["error"]) == ("failed", "LookupError: the sampler is gone")


class _WrongLate(rl.Env):
    """Finds out in the middle of the run that an option is wrong."""

    at = "reset"

    async def reset(self, row: Row) -> list[Message]:
        self._fail("reset")
        return [{"role": "user", "content": "?"}]

    async def reward(self, traj: rl.Trajectory, row: Row) -> float:
        self._fail("reward")
        return 0.0

    def _fail(self, where: str) -> None:
        if self.at == where:
            raise ConfigError(f"found in {where}")


class _WrongLearner(ScriptedLearner):
    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    async def open(self) -> None:
        self._fail("open")

    async def forward_backward(self, *args: Any, **options: Any) -> Any:
        self._fail("forward_backward")
        return await super().forward_backward(*args, **options)

    async def optimizer_step(self, *args: Any, **options: Any) -> Any:
        self._fail("optimizer_step")
        return await super().optimizer_step(*args, **options)

    async def close(self) -> None:
        self._fail("close")

    def _fail(self, where: str) -> None:
        if self._at == where:
            raise ConfigError(f"found in {where}")


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
    ("where", "code"),
    [
        *(("compose", 2), ("open", 2)),
        *(("reset", 1), ("reward", 1), ("forward_backward", 1), ("optimizer_step", 1), ("close", 1), ("observer", 1)),
    ],
)
def test_a_wrong_option_is_exit_code_2_only_before_the_run_begins(
    case: _Case, monkeypatch: pytest.MonkeyPatch, command: str, where: str, code: int
) -> None:
    """The class of the error does not decide, but when it comes."""
    if command == "eval" and where in ("forward_backward", "optimizer_step"):
        pytest.skip("an evaluation trains nothing")
    if command == "train" and where == "reset":
        code = 2  # the first row is reset before anything is loaded
    monkeypatch.setattr(_WrongLate, "at", where)

    def compose(recipe: Recipe, *, directory: Path | None = None) -> ComposedRun:
        if where == "compose":
            raise ConfigError("found in compose")
        engine = rl.RolloutEngine(
            scripted_policy(learner=_WrongLearner(where)),
            env=_WrongLate,
            renderer=ByteRenderer(),
            failures=rl.Failures(retry_delay=0.0),
        )
        evaluator = rl.Evaluator(rows=[7])
        trainer = rl.AsyncTrainer(
            engine=engine, optimizer=rl.Adam(lr=1.0), groups_per_step=2, group_size=2, evaluator=evaluator
        )

        def observe(event: Event) -> None:
            if where == "observer" and isinstance(event, EvaluationFinished):
                raise ConfigError("found in observer")

        trainer.events.subscribe(observe)
        return ComposedRun(trainer=trainer, engine=engine, evaluator=evaluator, rows=[0, 1, 2], steps=2)

    if command == "train" and where in ("forward_backward", "optimizer_step"):

        async def reward(self: Any, traj: rl.Trajectory, row: Row) -> float:
            return float(traj.member)

        monkeypatch.setattr(_WrongLate, "reward", reward)
    monkeypatch.setattr(composition, "compose", compose)
    found, lines, errors = case.train() if command == "train" else case.run("eval")
    assert (found, lines) == (code, [])
    assert f"found in {where}" in errors
    assert ("failed: " in errors) == (code == 1)


class _Pipe(io.StringIO):
    """Its reader goes away before the ``most``-th call."""

    def __init__(self, most: int, error: OSError) -> None:
        super().__init__()
        self._left = most
        self._error = error

    def write(self, text: str) -> int:
        self._use()
        return super().write(text)

    def flush(self) -> None:
        self._use()

    def _use(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "closed", "style"),
    [
        (BrokenPipeError(errno.EPIPE, "closed"), "both", "console"),
        (BrokenPipeError(errno.EPIPE, "closed"), "both", "json"),
        (BrokenPipeError(errno.EPIPE, "closed"), "out", "console"),
        (OSError(errno.EIO, "no terminal"), "err", "console"),
    ],
)
def test_a_run_outlives_the_readers_of_its_output(case: _Case, error: OSError, closed: str, style: str) -> None:
    """Progress, logs and the result line, wherever the pipe is closed: the run goes on to its end, and ends with 0."""
    for most in (0, 3, 8):
        out, err = (_Pipe(most if closed in (name, "both") else 10_000, error) for name in ("out", "err"))
        folder = case.directory / f"{closed}-{most}"
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(
                ["train", str(case.directory / "recipe.toml"), "--run-dir", str(folder), "--set", f"run.log={style}"]
            )
        assert code == 0
        assert len((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 5
        if closed == "err":
            assert json.loads(out.getvalue())["steps"] == 5


def test_another_error_of_a_stream_is_not_hidden(case: _Case) -> None:
    """A full disk has lost the result line."""
    with contextlib.redirect_stdout(_Pipe(0, OSError(errno.ENOSPC, "full"))), pytest.raises(OSError, match="full"):
        main(["--help"])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--help", "train nowhere.toml"])
def test_the_command_ends_as_ever_in_a_pipe_that_is_closed(arguments: str) -> None:
    """Also Python's own last look at its streams finds nothing to say."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "asyncrl", *arguments.split()]
    try:
        done = subprocess.run(command, check=False, stdout=write, stderr=subprocess.PIPE, timeout=60)
        both = subprocess.run(command, check=False, stdout=write, stderr=write, timeout=60)
    finally:
        os.close(write)
    assert done.returncode == both.returncode == (0 if arguments == "--help" else 2)
    assert b"BrokenPipe" not in done.stderr


def test_debug_shows_the_traceback(case: _Case) -> None:
    """Who mends the code needs the place."""

    def fail(request: SegmentRequest) -> Sequence[int]:
        raise LookupError("the sampler is gone")

    case.sample = fail
    code, _, errors = case.train("--debug")
    assert code == 1
    assert "Traceback" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_the_run_in_order(case: _Case, number: signal.Signals) -> None:
    """Exit code 0, the summary of what was done, and the files."""

    sent: list[int] = []

    def interrupt(request: SegmentRequest) -> Sequence[int]:
        if request.version == 2 and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return [65, END]

    case.sample = interrupt
    code, lines, errors = case.train("--set", "trainer.steps=1000000")
    assert code == 0
    result = json.loads(lines[0])
    assert result["stopped"] is True
    assert 1 <= result["steps"] < 1000
    assert f"{number.name}: stopping" in errors
    run = read_run(case.directory / "run")
    assert len(run.steps) == result["steps"]
    assert run.ended is not None
    assert run.ended["reason"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_signal_exits_at_once(number: signal.Signals, code: int) -> None:
    """Even if what the first one asked to stop never does."""
    script = f"""
import os, anyio
from asyncrl.observe.console import until_signal

async def stuck():
    os.kill(os.getpid(), {int(number)})
    try:
        await anyio.sleep_forever()
    finally:
        os.kill(os.getpid(), {int(number)})
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()

anyio.run(until_signal, stuck)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_a_keyboard_interrupt_before_the_run_has_no_traceback(case: _Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch is imported nothing listens for signals yet: Python's own interrupt ends the command."""

    def interrupted(recipe: Recipe, *, directory: Path | None = None) -> ComposedRun:
        raise KeyboardInterrupt

    monkeypatch.setattr(composition, "compose", interrupted)
    code, lines, errors = case.train()
    assert (code, lines) == (130, [])
    assert "Traceback" not in errors


def test_eval_prints_the_heldout_reward(case: _Case) -> None:
    """Of the model as it is, without training it or leaving files."""
    case.heldout = [7, 8]
    before = set(case.directory.iterdir())
    code, lines, _ = case.run("eval")
    result = json.loads(lines[0])
    assert code == 0
    assert result["heldout"] == 0.25
    assert result["trajectories"] == 4
    assert set(case.directory.iterdir()) == before


def test_eval_without_heldout_rows_measures_those_of_training(case: _Case) -> None:
    """And says so: how well they are known says less."""
    code, lines, errors = case.run("eval")
    assert code == 0
    assert json.loads(lines[0])["trajectories"] == 6
    assert "no rows are held out (data.heldout)" in errors


def test_serve_hands_its_options_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not given is left to the server's own defaults, and the key comes from the environment."""
    from asyncrl.servers import serve

    served: list[Any] = []
    monkeypatch.setattr(serve, "run_server", served.append)
    write_model(tmp_path)
    monkeypatch.setenv("ASYNCRL_TEST_KEY", "hush")
    code = main(["serve", "--model", str(tmp_path), "--port", "0", "--api-key-env", "ASYNCRL_TEST_KEY"])
    assert code == 0
    assert served == [serve.ServerOptions(model=tmp_path, port=0, api_key="hush")]
    assert capsys.readouterr().out == ""


def test_the_demo_is_found_and_its_recipe_is_right(case: _Case) -> None:
    """``asyncrl demo`` needs no argument."""
    code = main(["demo", "--run-dir", str(case.directory / "run"), "--set", "trainer.steps=2"])
    assert code == 0
    [recipe] = case.recipes
    assert recipe.path.parts[-3:] == ("envs", "guess_number", "recipe.toml")


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["serve"], ["simulate"]])
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As argparse does it."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: asyncrl" in capsys.readouterr().err


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Who scripts the command finds them where options are looked up."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert "exit codes:" in text
    assert "--set section.key=value" in text


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """For the command and for programs."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"asyncrl {asyncrl.__version__}\n"
