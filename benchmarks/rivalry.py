"""Whole runs beside river-client 0.16.0: CPU for each segment, and how long the event loop stalls.

Both sides train the same loads (``rollouts.py``), each in its own process, one after the other, on one interpreter.
river-client needs Python 3.12, which need not be the one that runs this; uv installs the packages of both sides for it.
Without it the lines have our own figure only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.answer import Answer
from benchmarks.rollouts import Load, Measured

__all__ = ["answers"]

_ROOT = Path(__file__).parents[1]
_RIVER = "river-client==0.16.0"
_OLDEST = (3, 12)
_UNUSED = ("torch", "transformers", "peft")
# Dependencies of asyncrl that a run with scripted parts does not import.
_TIMEOUT_S = 300.0
_REPEATS = 3
# Of ours always, of river's where the ratio has its goal: it takes a minute for each repetition of everything.
_SIZES = ((64, 1024), (256, 1024), (1024, 3072), (4096, 4096))
# Concurrency, and trajectories of a run.
_COMPARED = 1024
# The concurrency at which the ratio has its goal.
_RATIO, _FLAT, _STALL_MS = 0.2, 1.3, 50.0


def answers() -> Iterator[Answer]:
    """CPU and stalls of every load, asynchronous and synchronous, and how flat our CPU is over the concurrencies."""
    command = _command()
    for turns in (1, 3):
        figures = []
        for concurrency, trajectories in _SIZES:
            load = Load(turns=turns, concurrency=concurrency, max_staleness=2, trajectories=trajectories)
            comparison = _Comparison(load, command)
            figures.append(comparison.ours(_us_per_segment))
            yield from comparison.answers()
        yield Answer(
            question=f"dearest CPU of all concurrencies up to {_SIZES[-1][0]}, {turns} turn(s), S=2",
            figure=max(figures),
            unit="us/segment",
            anchor=f"the same with {_SIZES[0][0]} concurrent trajectories",
            anchor_figure=figures[0],
            ratio=max(figures) / figures[0],
            goal=f"ratio at most {_FLAT}",
            meets_goal=max(figures) <= _FLAT * figures[0],
        )
        load = Load(turns=turns, concurrency=_COMPARED, max_staleness=0, trajectories=3 * _COMPARED)
        yield from _Comparison(load, command).answers()


def _us_per_segment(run: Measured) -> float:
    return run.cpu_s / run.segments * 1e6


def _us_per_trajectory(run: Measured) -> float:
    return run.cpu_s / run.trajectories * 1e6


def _stall_ms(run: Measured) -> float:
    return run.stall_s * 1e3


class _Comparison:
    """One load, run on both sides; on ours alone without a ``command`` that runs river-client."""

    def __init__(self, load: Load, command: Sequence[str] | None) -> None:
        self._load = load
        self._most = _RATIO if load.concurrency == _COMPARED else 1.0
        self._ours = _measure(command or [sys.executable], "asyncrl", load, _REPEATS)
        self._rivers: list[Measured] = []
        if command is not None:
            self._rivers = _measure(command, "river", load, _REPEATS if load.concurrency == _COMPARED else 1)

    def ours(self, figure: Callable[[Measured], float]) -> float:
        """The median of our runs."""
        return statistics.median(map(figure, self._ours))

    def answers(self) -> Iterator[Answer]:
        """CPU for each segment and each trajectory beside river's, and the longest stall."""
        for what, unit, figure in (
            ("CPU", "us/segment", _us_per_segment),
            ("CPU", "us/trajectory", _us_per_trajectory),
            ("longest stall of the event loop", "ms of CPU", _stall_ms),
        ):
            ours = self.ours(figure)
            river = statistics.median(map(figure, self._rivers)) if self._rivers else None
            stalls = figure is _stall_ms
            yield Answer(
                question=f"{what}, {self._load.turns} turn(s), {self._load.concurrency} concurrent trajectories, "
                f"S={self._load.max_staleness}",
                figure=ours,
                unit=unit,
                anchor=_RIVER,
                anchor_figure=river,
                ratio=None if river is None else ours / river,
                goal=f"under {_STALL_MS:g} ms" if stalls else f"ratio at most {self._most:g}",
                meets_goal=river is not None and (ours < _STALL_MS if stalls else ours <= self._most * river),
            )


def _measure(command: Sequence[str], side: str, load: Load, repeats: int) -> list[Measured]:
    """Run one side in a process of its own."""
    options = [f"--{key.replace('_', '-')}={value}" for key, value in asdict(load).items()]
    done = _run([*command, "-m", "benchmarks.rollouts", f"--side={side}", f"--repeats={repeats}", *options])
    return [Measured(**run) for run in json.loads(done.stdout.splitlines()[-1])]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Raises ``CalledProcessError`` with what the process said."""
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    environment |= {"PYTHONPATH": str(_ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S, cwd=_ROOT, env=environment
    )


class _UnavailableError(Exception):
    """river-client cannot be run here."""


def _command() -> list[str] | None:
    """What runs Python with both sides installed; None, with the reason on stderr, if it cannot be had."""
    try:
        return _installed()
    except _UnavailableError as reason:
        print(f"river-client is not measured: {reason}", file=sys.stderr)
        return None


def _installed() -> list[str]:
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise _UnavailableError("uv is not installed")
    interpreter = _interpreter(uv)
    if interpreter is None:
        raise _UnavailableError(f"there is no Python {'.'.join(map(str, _OLDEST))} or later")
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    needs = [need for need in project["dependencies"] if not need.startswith(_UNUSED)]
    command = [uv, "run", "--quiet", "--no-project", "--python", interpreter]
    command += [argument for need in (_RIVER, *needs) for argument in ("--with", need)]
    command.append("python")
    try:
        _run([*command, "-c", "import river_client.rl"])
    except subprocess.SubprocessError as error:
        raise _UnavailableError(f"{_RIVER} cannot be installed: {getattr(error, 'stderr', '') or error}") from error
    return command


def _interpreter(uv: str) -> str | None:
    """A Python that is new enough: this one, one that uv knows, or one of pyenv's."""
    if sys.version_info >= _OLDEST:
        return sys.executable
    wanted = f">={'.'.join(map(str, _OLDEST))}"
    found = subprocess.run([uv, "python", "find", wanted], capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return found.stdout.strip()
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    numbered = {
        (int(version[1]), int(version[2])): folder / "bin" / "python"
        for folder in versions.glob("*")
        if (version := re.match(r"(\d+)\.(\d+)", folder.name))
    }
    new_enough = [version for version, python in numbered.items() if version >= _OLDEST and python.exists()]
    return str(numbered[min(new_enough)]) if new_enough else None
