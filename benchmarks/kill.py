"""A run is killed at random times and resumed until it is done: what is lost, what happens twice, what is different?

Real processes and SIGKILL. Most kills hit runs with scripted samplers inside (``killed.py``), which start in half a
second: of every completion mode, with rows whose groups are rolled out anew, dropped or never sampled, and with servers
that are removed and added again. Every tenth kill hits the guess-a-number recipe by the command line, with its embedded
server in a process of its own and all weights trained. Prints one JSON line for each question.

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
from asyncrl.checkpoint.snapshots import Snapshots
from benchmarks.answer import Answer
from benchmarks.pause import longest_pause

__all__ = ["main"]

_HERE = Path(__file__).resolve().parent
_STEPS = 30
_LONGEST_LIFE_S = 1.5
_MOST_KILLS = 4
# Of one run.
_RECOVERIES = ("stateless", "snapshot", "drop")
_MASKING = ("discard", "carry_over")
# Modes that do not keep groups whole, and so mask what is too old.
_KINDS: tuple[dict[str, Any], ...] = (
    {"mode": "wait", "max_staleness": 2},
    {"mode": "carry_over", "max_staleness": 2},
    {"mode": "wait", "max_staleness": 2, "fleet": True},
    {"mode": "discard", "max_staleness": 2},
    {"mode": "truncate", "max_staleness": 1},
    {"mode": "wait", "max_staleness": 0},
    {"mode": "carry_over", "max_staleness": 1},
)
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
    stuck: int = 0
    """Runs that ended with an error instead of going on."""
    begun_anew: int = 0
    rerolled: int = 0
    replayed: list[float] = field(default_factory=list)

    def compare(self, found: Counter[Any], expected: Counter[Any]) -> None:
        """Count what is missing and what there is too much of."""
        self.lost += (expected - found).total()
        self.repeated += (found - expected).total()


def _command(directory: Path, options: dict[str, Any]) -> list[str]:
    return [sys.executable, str(_HERE / "killed.py"), str(directory), json.dumps(options)]


class _StuckError(Exception):
    """A process of a run ended by itself, and not well."""


def _live(command: Sequence[str], seconds: float | None, *, begun: bool = False) -> tuple[list[dict[str, Any]], bool]:
    """Run for so long, then kill; the lines that it printed, and whether it had ended by itself.

    ``begun``: the time counts from the first line, when the run has opened.
    """
    # Without a buffer, so that nothing of what it says is lost between the two ways of reading.
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.readline() if begun else b""
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            output, _ = process.communicate()
    ended = process.returncode == 0
    if not ended and process.returncode != -signal.SIGKILL:
        raise _StuckError(f"{command} ended with {process.returncode}")
    return [json.loads(line) for line in (first + output).split(b"\n") if line.endswith(b"}")], ended


def _whole(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The last line of a run that nobody kills."""
    lines, _ = _live(_command(folder / f"whole-{options['max_staleness']}", options), None)
    return lines[-1]


def scripted(kills: int, folder: Path, draw: random.Random) -> Tally:
    """Kill until there were so many kills; every run is brought to its end, if it can be."""
    tally = Tally()
    plain = {"steps": _STEPS, "recovery": "drop", "mode": "wait"}
    wholes = {bound: _whole({**plain, "max_staleness": bound}, folder) for bound in (0, 2)}
    for number in itertools.count():
        if tally.kills == kills:
            return tally
        options: dict[str, Any] = {**plain, **_KINDS[number % len(_KINDS)], "recovery": _RECOVERIES[number % 3]}
        run = folder / f"run-{number}"
        tally.runs += 1
        try:
            lines = _survive(_command(run, options), kills, tally, draw)
        except _StuckError as error:
            print(f"{error}; the run is {options}", file=sys.stderr, flush=True)
            tally.stuck += 1
            continue
        _judge(lines, options, run, wholes, tally)
    raise AssertionError("the loop ends itself")


def _judge(
    lines: Sequence[dict[str, Any]], options: dict[str, Any], run: Path, wholes: dict[int, Any], tally: Tally
) -> None:
    last, steps = lines[-1], [line for line in lines if "n" in line]
    bound = options["max_staleness"]
    said = Counter(line["n"] for line in steps)
    tally.repeated_steps += said.total() - len(said)
    tally.replayed += [line["replayed"] for line in steps]
    tally.begun_anew += sum(line["begun_anew"] > 0 for line in steps)
    tally.rerolled += int(steps[-1]["rerolled"]) if steps else 0
    if options["mode"] not in _MASKING:
        tally.too_old += sum(line["age"] > bound for line in steps)
    if options["mode"] == "wait" and not options.get("fleet"):
        whole = wholes[bound]
        rows, expected = (Counter(itertools.chain(*one["rows"])) for one in (last, whole))
        tally.compare(rows, expected)
        tally.repeated_steps += abs(last["version"] - whole["version"])
        tally.different += bound == 0 and last["parameters"] != whole["parameters"]
    _balance(run, tally)


def _balance(run: Path, tally: Tally) -> None:
    """By the whole journal: no member is in two steps, and every admitted row is in one, dropped, or in the state."""
    journal = Journal(run / "journal", run / "refused")
    entries = [journal.read(n, sequences=False) for n in journal.steps()]
    parts = [one for entry in entries for one in entry.consumed]
    members = Counter((part.group, member) for part in parts for member in part.members)
    final = Counter(part.group for part in parts if part.final)
    tally.repeated += sum(count - 1 for count in (*members.values(), *final.values()))
    state = Snapshots(run / "state").read(lambda group: group)
    assert state is not None
    tally.lost += abs(state.admitted - state.dropped - len(state.groups.keys() | final.keys()))
    tally.lost += len(state.groups.keys() & final.keys()) + _STEPS - len(entries)


def _survive(command: Sequence[str], kills: int, tally: Tally, draw: random.Random) -> list[dict[str, Any]]:
    """Kill a few times and bring it to its end; all lines that it printed. One kill in five comes while it opens."""
    lines: list[dict[str, Any]] = []
    kills = min(kills, tally.kills + draw.randint(1, _MOST_KILLS))
    while True:
        seconds = draw.uniform(0, _LONGEST_LIFE_S) if tally.kills < kills else None
        said, ended = _live(command, seconds, begun=draw.random() < 0.8)
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
        rerolled = f"with {tally.rerolled} groups rolled out anew"
        yield _zero(f"runs that cannot be resumed, of {tally.runs} {rerolled}", tally.stuck, "runs")
        yield _zero("groups that could not have been trained in time after a resume", tally.begun_anew, "groups")
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
