"""How many tokens a second does the learner train, and in how much memory, beside other people's learners?

One small random Qwen3, the same sequences, loss, threads and float32 for all; each learner in a process of its own, and
the rounds by turns: ours, TRL, .., ours, TRL, ... Tokens are those of the sequences, prompts included, however few of
them a learner computes. Memory is the peak over what is resident when the model is loaded and has its gradients
(``contestant.py``). Before any figure counts, the learners must agree about loss, log-probabilities, entropies and the
norm of the gradient, so that all do the same work. Prints one JSON line for each question, nothing else.

    uv run --group anchors python -m benchmarks.learner --only shared

Without the group ``anchors`` only plain transformers is compared with. Threads wait for each other, so on a machine
with other work take ``--threads 1 --clock cpu``, which counts CPU seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.answer import Answer
from benchmarks.learners.workloads import FULL, QUICK, WORKLOADS, samples, write_model

__all__ = ["LEARNERS", "Settings", "answers", "commands", "main"]

LEARNERS: Mapping[str, str] = {
    "ours": "asyncrl",
    "trl": "TRL's GRPO step",
    "tree": "TRL's tree rows",
    "liger": "Liger's chunked loss",
    "keep": "plain transformers, logits of answers",
    "eager": "plain transformers, all logits",
}
_NEEDS: Mapping[str, str] = {"trl": "trl", "tree": "trl", "liger": "liger_kernel"}
_PLAIN = ("keep", "eager")
_TIMES_PLAIN: Mapping[str, float] = {"uniform": 1.5, "heavy": 3.0, "shared": 2.5, "turns": 2.0}
_TIMES_TREE: Mapping[str, float] = {"shared": 2.5}
_MEMORY, _AGREEMENT = 0.5, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says."""

    rounds: int = 5
    threads: int = 2
    clock: str = "wall"
    quick: bool = False


@dataclass(slots=True, kw_only=True)
class _Measured:
    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    check: Mapping[str, Any] = field(default_factory=dict)


class _Process:
    """A learner's process; it ends when its input does."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self._name = " ".join(command)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def read(self) -> dict[str, Any]:
        """The next answer; ``RuntimeError`` if the process ended without one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended before its answer; see above")
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, command: str) -> dict[str, Any]:
        """Have it do a command."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self.read()


def answers(workload: str, settings: Settings, commands: Mapping[str, Sequence[str]]) -> Iterator[Answer]:
    """Every question about a workload. ``commands`` starts each learner: ``WORKLOAD MODEL THREADS`` are added to it."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder, ExitStack() as stack:
        write_model(Path(folder), QUICK if settings.quick else FULL)
        processes = {
            name: stack.enter_context(_Process([*command, *_arguments(workload, folder, settings)], settings.threads))
            for name, command in commands.items()
        }
        measured = _rounds(processes, settings)
    yield _agreement(workload, measured)
    tokens = sum(len(one.tokens) for one in samples(workload, QUICK if settings.quick else FULL))
    speeds = {name: tokens / statistics.median(one.seconds) for name, one in measured.items()}
    yield from _speed_answers(workload, speeds, settings)
    yield _memory(workload, {name: one.peak_mib for name, one in measured.items()})


def _arguments(workload: str, folder: str, settings: Settings) -> list[str]:
    return [workload, folder, str(settings.threads), *(["quick"] if settings.quick else [])]


def _rounds(processes: Mapping[str, _Process], settings: Settings) -> dict[str, _Measured]:
    measured = {name: _Measured() for name in processes}
    for process in processes.values():
        process.read()
    for number in range(settings.rounds + 1):
        for name, process in processes.items():
            said = process.ask("round")
            measured[name].peak_mib = said["peak_mib"]
            if number:
                # The first one finds caches cold and memory not yet asked for.
                measured[name].seconds.append(said["cpu_s" if settings.clock == "cpu" else "seconds"])
    for name, process in processes.items():
        measured[name].check = process.ask("check")
    return measured


def _agreement(workload: str, measured: Mapping[str, _Measured]) -> Answer:
    """The largest difference of any learner from plain transformers."""
    plain = measured["keep"].check
    worst = max(_difference(one.check, plain) for one in measured.values())
    return Answer(
        question=f"largest difference of any learner's log-probabilities, loss, entropy and gradient, {workload}",
        figure=worst,
        unit="nats, or part of it",
        anchor=LEARNERS["keep"],
        anchor_figure=0.0,
        ratio=None,
        goal=f"at most {_AGREEMENT:g}",
        meets_goal=worst <= _AGREEMENT,
    )


def _difference(one: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    found: list[float] = [abs(one[key] - plain[key]) / abs(plain[key]) for key in ("loss", "gradient_norm")]
    if one["entropy"] is not None:
        found.append(abs(one["entropy"] - plain["entropy"]) / abs(plain["entropy"]))
    if one["logprobs"] is not None:
        found += [abs(a - b) for a, b in zip(one["logprobs"], plain["logprobs"], strict=True)]
    return max(found)


def _speed_answers(workload: str, speeds: Mapping[str, float], settings: Settings) -> Iterator[Answer]:
    plain = max((name for name in _PLAIN), key=lambda name: speeds[name])
    for name, speed in speeds.items():
        if name == "ours":
            continue
        least = _TIMES_TREE.get(workload, 1.0) if name == "tree" else 1.0
        if name == plain:
            least = _TIMES_PLAIN[workload]
        yield Answer(
            question=f"training speed, {workload}, {settings.threads} thread(s), {settings.clock} time",
            figure=speeds["ours"],
            unit="tokens/s",
            anchor=LEARNERS.get(name, name) + (" (the faster of the plain ones)" if name == plain else ""),
            anchor_figure=speed,
            ratio=speeds["ours"] / speed,
            goal=f"ratio at least {least:g}",
            meets_goal=speeds["ours"] >= least * speed,
        )


def _memory(workload: str, peaks_mib: Mapping[str, float]) -> Answer:
    best = min((name for name in peaks_mib if name in LEARNERS and name != "ours"), key=lambda name: peaks_mib[name])
    others = ", ".join(f"{name} {mib:.0f}" for name, mib in peaks_mib.items() if name not in ("ours", best))
    return Answer(
        question=f"peak memory over weights and gradients, {workload} (others: {others})",
        figure=peaks_mib["ours"],
        unit="MiB",
        anchor=f"{LEARNERS[best]}, which needs least of the others",
        anchor_figure=peaks_mib[best],
        ratio=peaks_mib["ours"] / peaks_mib[best],
        goal=f"ratio at most {_MEMORY:g}",
        meets_goal=peaks_mib["ours"] <= _MEMORY * peaks_mib[best],
    )


def commands() -> dict[str, list[str]]:
    """What starts each learner that can run here; what is left out, and why, goes to the standard error."""
    found = {}
    for name, title in LEARNERS.items():
        if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
            print(f"{title} is left out: {_NEEDS[name]} is not installed (uv run --group anchors ..)", file=sys.stderr)
            continue
        found[name] = [sys.executable, "-m", "benchmarks.learners.contestant", name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKLOADS, help="run one workload")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: seconds of the processor")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round, to see that all works")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    settings = Settings(rounds=rounds, threads=options.threads, clock=options.clock, quick=options.quick)
    for workload in WORKLOADS if options.only is None else (options.only,):
        for answer in answers(workload, settings, commands()):
            print(answer.line(), flush=True)


if __name__ == "__main__":
    main()
