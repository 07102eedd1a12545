"""A run is killed at random times and resumed until it is done: what is lost, what happens twice, what is different?

Real processes and SIGKILL. Most kills hit a run with a scripted sampler inside (``killed.py``), which starts in half a
second; every tenth one the guess-a-number recipe by the command line, with its embedded server in a process of its own
and all weights trained. Prints one JSON line for each question.

    uv run python benchmarks/kill.py --kills 200
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.journal import Journal
from benchmarks.answer import Answer
from benchmarks.pause import longest_pause

__all__ = ["main"]

_HERE = Path(__file__).resolve().parent
_STEPS = 30
_LONGEST_LIFE_S = 2.5
_SHARE_OF_SERVERS = 10
_RECIPE = _HERE.parent / "envs/guess_number/recipe.toml"
_SERVED = (
    "trainer.groups_per_step=2",
    "trainer.group_size=4",
    "env.tool_latency=0.02",
    "checkpoint.rollout_every=0.2",
    "checkpoint.weights_every=4",
    "optimizer.schedule=constant",
    "optimizer.warmup=0",
    "optimizer.floor=0.0",
    "run.log=json",
)


@dataclass(slots=True)
class Tally:
    """What went wrong in all runs, and how many kills there were."""

    kills: int = 0
    runs: int = 0
    lost: int = 0
    repeated: int = 0
    repeated_steps: int = 0
    different: int = 0
    too_old: int = 0
    replayed: list[float] = field(default_factory=list)

    def compare(self, found: Counter[Any], expected: Counter[Any]) -> None:
        """Count what is missing and what there is too much of."""
        self.lost += (expected - found).total()
        self.repeated += (found - expected).total()


def _command(directory: Path, options: dict[str, Any]) -> list[str]:
    return [sys.executable, str(_HERE / "killed.py"), str(directory), json.dumps(options)]


def _live(command: Sequence[str], seconds: float | None) -> tuple[list[dict[str, Any]], bool]:
    """Run for so long, then kill; the lines that it printed, and whether it had ended by itself."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            output, _ = process.communicate()
    ended = process.returncode == 0
    if not ended and process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return [json.loads(line) for line in output.split(b"\n") if line.endswith(b"}")], ended


def _whole(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The last line of a run that nobody kills."""
    lines, _ = _live(_command(folder / f"whole-{options['max_staleness']}", options), None)
    return lines[-1]


def scripted(kills: int, folder: Path, draw: random.Random) -> Tally:
    """Kill until there were so many kills; every run is brought to its end."""
    tally = Tally()
    wholes = {bound: _whole({"steps": _STEPS, "max_staleness": bound, "recovery": "drop"}, folder) for bound in (0, 2)}
    for number in itertools.count():
        if tally.kills == kills:
            return tally
        bound = 0 if number % 3 else 2
        options: dict[str, Any] = {"steps": _STEPS, "max_staleness": bound}
        options["recovery"] = ("stateless", "snapshot", "drop")[number % 3]
        lines = _survive(_command(folder / f"run-{number}", options), kills, tally, draw)
        last, steps = lines[-1], [line for line in lines if "n" in line]
        whole = wholes[bound]
        rows, expected = (Counter(itertools.chain(*one["rows"])) for one in (last, whole))
        tally.compare(rows, expected)
        said = Counter(line["n"] for line in steps)
        tally.repeated_steps += said.total() - len(said) + abs(last["version"] - whole["version"])
        tally.too_old += sum(line["age"] > bound for line in steps)
        tally.different += bound == 0 and last["parameters"] != whole["parameters"]
        tally.replayed += [line["replayed"] for line in steps]
        tally.runs += 1
    raise AssertionError("the loop ends itself")


def _survive(command: Sequence[str], kills: int, tally: Tally, draw: random.Random) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    while True:
        seconds = draw.uniform(0, _LONGEST_LIFE_S) if tally.kills < kills else None
        said, ended = _live(command, seconds)
        lines += said
        if ended:
            return lines
        tally.kills += 1


def served(kills: int, folder: Path, draw: random.Random) -> Tally:
    """The recipe by the command line. Groups are counted in the journal as each killed process left it."""
    tally = Tally(runs=1)
    run = folder / "served"
    # A step takes some tenths of a second, and each kill wants a few of its own.
    planned = 6 + 6 * kills
    consumed: dict[int, set[int]] = {}
    while True:
        resume = ["--resume", str(run)] if (run / "run.json").exists() else ["--run-dir", str(run)]
        overrides = [part for override in (*_SERVED, f"trainer.steps={planned}") for part in ("--set", override)]
        command = [sys.executable, "-m", "asyncrl", "train", str(_RECIPE), *resume, *overrides]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            if tally.kills < kills:
                _wait_for_steps(process, run, len(consumed) + draw.choice([0, 1, 2]))
                time.sleep(draw.uniform(0, 0.3))
                process.send_signal(signal.SIGKILL)
            process.communicate()
        if process.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{command} ended with {process.returncode}")
        _harvest(run, consumed, tally)
        if process.returncode == 0:
            break
        tally.kills += 1
    groups = Counter(itertools.chain(*consumed.values()))
    tally.repeated += sum(count - 1 for count in groups.values())
    tally.lost += max(0, 2 * planned - len(groups)) + (planned - len(consumed))
    return tally


def _wait_for_steps(process: subprocess.Popen[bytes], run: Path, steps: int) -> None:
    """Until the process has committed more than ``steps`` steps, those before it included, or has ended."""
    while process.poll() is None and not any(int(path.stem) > steps for path in _entries(run)):
        time.sleep(0.01)


def _entries(run: Path) -> list[Path]:
    return list((run / "journal").glob("[0-9]*.safetensors"))


def _harvest(run: Path, consumed: dict[int, set[int]], tally: Tally) -> None:
    """Note what each step consumed, from the journal and from the events; a step may say it only once."""
    journal = Journal(run / "journal", run / "refused")
    found = {n: {one.group for one in journal.read(n, sequences=False).consumed} for n in journal.steps()}
    for line in (run / "events.jsonl").read_bytes().split(b"\n") if (run / "events.jsonl").exists() else ():
        if b'"event":"group_consumed"' in line and line.endswith(b"}"):
            event = json.loads(line)
            found.setdefault(event["n"], set()).add(event["group"])
    for n, groups in found.items():
        tally.repeated_steps += not consumed.setdefault(n, groups) >= groups
        consumed[n] |= groups


def _answers(kills: int, seed: int) -> Iterator[Answer]:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="asyncrl-kill-") as name:
        os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
        of_servers = max(1, kills // _SHARE_OF_SERVERS)
        tally = scripted(max(0, kills - of_servers), Path(name), draw)
        yield from _report(tally, f"scripted sampler, {tally.kills} kills of {tally.runs} runs")
        yield _zero(
            f"final weights of synchronous runs, {tally.kills} kills of {tally.runs} runs",
            tally.different,
            "runs that differ in a bit",
        )
        yield _zero("tokens older than the bound", tally.too_old, "steps with one")
        tally = served(of_servers, Path(name), draw)
        yield from _report(tally, f"embedded server and command line, {tally.kills} kills of 1 run")
    yield longest_pause()


def _report(tally: Tally, what: str) -> Iterator[Answer]:
    yield _zero(f"rows lost, {what}", tally.lost, "rows")
    yield _zero(f"rows trained twice, {what}", tally.repeated, "rows")
    yield _zero(f"committed steps repeated, {what}", tally.repeated_steps, "steps")


def _zero(question: str, figure: int, unit: str) -> Answer:
    return Answer(
        question=question,
        figure=float(figure),
        unit=unit,
        anchor="the run that nobody kills",
        anchor_figure=0.0,
        ratio=None,
        goal="0",
        meets_goal=figure == 0,
    )


def main() -> None:
    """Answer every question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="in all (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    arguments = parser.parse_args()
    for answer in _answers(arguments.kills, arguments.seed):
        print(answer.line(), flush=True)


if __name__ == "__main__":
    main()
