from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.main import main
from asyncrl.events import Event
from asyncrl.simulation.command import default_steps
from asyncrl.simulation.grid import Point, own_point
from asyncrl.simulation.simulate import Outcome, Simulation
from tests.simulation.recording import run_options, workload, write_events

_KEYS = {
    "max_staleness",
    "admit_ahead",
    "concurrency",
    "oversample_factor",
    "recipe",
    "steps",
    "steps_per_hour",
    "trained_tokens_per_second",
    "trainer_idle",
    "wait_for_samples_share",
    "barrier_share",
    "publication_share",
    "age_mean",
    "age_p99",
}


class _Command:
    """``asyncrl simulate`` of the small recipe."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.options = run_options(folder)
        self._capture = capture

    def run(self, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        """Exit code, lines of stdout, stderr."""
        code = main(["simulate", str(self.folder / "recipe.toml"), *arguments])
        captured = self._capture.readouterr()
        return code, [json.loads(line) for line in captured.out.splitlines()], captured.err

    def record(self, *, max_staleness: int = 1) -> Path:
        """A run of the recipe: 3 s of training in each step."""
        events: list[Event] = []
        point = own_point(run_options(self.folder, f"trainer.max_staleness={max_staleness}"))
        script = workload(tokens=10, own=0.1, train_s=3.0, publish_s=0.8)
        simulation = Simulation(self.options, point, script, steps=8, seed=0)
        simulation.events.subscribe(events.append)
        simulation.run()
        return write_events(self.folder, events)


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> _Command:
    """In an empty folder."""
    return _Command(tmp_path, capsys)


def test_a_grid_is_a_line_for_each_point_and_a_table(command: _Command) -> None:
    """The recipe's own point is the first and the only one that is marked."""
    code, lines, errors = command.run("--max-staleness", "0,1", "--concurrency", "2,8", "--steps", "4", "--no-picture")
    assert code == 0
    assert all(line.keys() == _KEYS for line in lines)
    chosen = [(line["max_staleness"], line["concurrency"]) for line in lines]
    assert chosen == [(1, 256), (0, 2), (0, 8), (1, 2), (1, 8)]
    assert [line["recipe"] for line in lines] == [True, False, False, False, False]
    for line in lines:
        parts = (line[key] for key in ("wait_for_samples_share", "barrier_share", "publication_share"))
        assert line["trainer_idle"] == pytest.approx(sum(parts), abs=1e-3)
    assert "simulating 4 steady steps at each of 5 points, with 512 groups made from distributions" in errors
    assert "recipe 1" in errors
    assert f"{lines[0]['steps_per_hour']:,.0f}" in errors
    assert list(command.folder.glob("*.svg")) == []


def test_a_recorded_run_is_compared_with_its_simulation(command: _Command) -> None:
    """Training and staging take 3.2 s in both; without overlap there are 1 s of sampling and 0.8 of publishing more."""
    folder = command.record()
    code, lines, errors = command.run("--from", str(folder), "--max-staleness", "0", "--no-picture")
    assert code == 0
    assert lines[0]["steps_per_hour"] == pytest.approx(1125)
    assert lines[0]["measured_steps_per_hour"] == pytest.approx(1125)
    assert lines[1]["steps_per_hour"] == pytest.approx(720)
    assert "measured_steps_per_hour" not in lines[1]
    assert "the run itself did 1,125 steps an hour; simulated: 1,125 (+0.0%)" in errors


def test_a_run_of_another_bound_is_replayed_but_not_compared(command: _Command) -> None:
    """Its rate would be no measure of the recipe's."""
    folder = command.record(max_staleness=0)
    code, lines, errors = command.run("--from", str(folder), "--admit-ahead", "1", "--no-picture")
    assert code == 0
    assert lines[0]["steps_per_hour"] == pytest.approx(1125)
    assert "measured_steps_per_hour" not in lines[0]
    assert "the run itself" not in errors


def test_what_the_trainer_refuses_is_left_out_and_said(command: _Command) -> None:
    """Oversampling is refused with a bound of 0 only."""
    arguments = ["--max-staleness", "0,1", "--oversample", "1,2", "--steps", "1", "--no-picture"]
    code, lines, errors = command.run(*arguments)
    assert code == 0
    assert [(line["max_staleness"], line["oversample_factor"]) for line in lines] == [(1, 1.0), (0, 1.0), (1, 2.0)]
    assert "left out max_staleness 0, admit_ahead 2, concurrency 256, oversample_factor 2: " in errors


def test_points_that_admit_the_same_are_simulated_once(command: _Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are printed."""
    simulated: list[Point] = []
    run = Simulation.run

    def counted(self: Simulation) -> Outcome:
        simulated.append(self.point)
        return run(self)

    monkeypatch.setattr(Simulation, "run", counted)
    code, lines, _ = command.run("--admit-ahead", "1,2,3", "--steps", "1", "--no-picture")
    assert code == 0
    assert len(simulated) == 1
    assert [line["admit_ahead"] for line in lines] == [2, 1, 3]
    assert len({line["steps_per_hour"] for line in lines}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "trainer.normalize=prmopt"], "normalize"),
        (["--set", "rollout.temperature=0.0"], "temperature is 0"),
        (["--set", "trainer.loss=cipso"], "cipso"),
        (["--from", "no-such-run"], "--from is 'no-such-run', but no-such-run/events.jsonl cannot be read"),
        (["--concurrency", "many"], "--concurrency is 'many'"),
        (["--picture", "plot.pdf"], "--picture is 'plot.pdf'"),
    ],
)
def test_errors_are_found_before_anything_is_simulated(
    command: _Command, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, one line that names the key, no traceback."""
    monkeypatch.setattr(Simulation, "run", lambda self: pytest.fail("it was simulated"))
    code, lines, errors = command.run(*arguments)
    assert (code, lines) == (2, [])
    assert message in errors
    assert "Traceback" not in errors


def test_the_default_number_of_steps_follows_from_the_work(command: _Command) -> None:
    """Fewer for more points or more requests, no more than the run had, in rounds of 8 and at least one."""
    points = [own_point(command.options)] * 10

    def steps(script_turns: int, count: int, most: int = 10**6) -> int:
        return default_steps(command.options, workload(turns=script_turns), points[:count], most=most)

    # A step is four trajectories and, with one turn, four requests; three more steps are around the steady ones.
    assert steps(1, 1) > 2 * steps(1, 10) > 4 * steps(9, 10)
    assert steps(1, 10, most=20) == 16
    assert steps(100_000, 10) == 8


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_drawn(command: _Command, suffix: str) -> None:
    """The same simulation is the same file, to the byte."""
    path = command.folder / f"plot.{suffix}"
    pictures = []
    for _ in range(2):
        code, _, errors = command.run("--max-staleness", "0,2", "--steps", "2", "--picture", str(path))
        assert code == 0
        assert f"picture: {path}" in errors
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_without_matplotlib_the_extra_that_adds_it_is_named(
    command: _Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A picture that was asked for is refused before anything is simulated, the one that nobody named is left out."""
    for module in ("options", "command"):
        monkeypatch.setattr(f"asyncrl.simulation.{module}.has_module", lambda name: False)
    monkeypatch.chdir(tmp_path)
    code, lines, errors = command.run("--max-staleness", "1", "--steps", "1")
    assert (code, len(lines)) == (0, 1)
    assert "pip install 'asyncrl[plot]'" in errors
    code, lines, errors = command.run("--picture", "plot.svg")
    assert (code, lines) == (2, [])
    assert "--picture is 'plot.svg', but must be left out: " in errors
    assert "pip install 'asyncrl[plot]'" in errors


@pytest.mark.slow
def test_a_simulation_imports_neither_torch_nor_the_environment(command: _Command) -> None:
    """Without a picture matplotlib is not loaded either; the recipe's env.py does not exist."""
    script = f"""
import sys
from asyncrl.cli.main import main
assert main(["simulate", {str(command.folder / "recipe.toml")!r}, "--steps", "1", "--no-picture"]) == 0
print(sorted({{"torch", "transformers", "peft", "matplotlib"}} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"
