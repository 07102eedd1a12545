"""One learner in a process of its own: it does as the benchmark says on its input, and answers in lines of JSON.

What counts as a model's own memory: everything that is resident when the model is loaded and a first pass over one
sequence has left its gradients. The peak over that is what a learner needs besides.

Run by ``benchmarks.learner``: python -m benchmarks.learners.contestant NAME WORKLOAD MODEL THREADS [quick]
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.learners.workloads import FULL, QUICK, Sample, samples

__all__ = ["Contestant", "Pass", "serve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a learner says about one pass over all sequences, for comparison with the others."""

    loss: float
    """Sum over the trained tokens of -sg(min(exp(logp - mu), 6)) A logp."""
    logprobs: Sequence[float] | None
    """Of the trained tokens, sequence after sequence; None if the learner keeps them to itself."""
    entropy: float | None
    """Sum over the trained tokens; None if the learner computes none."""


class Contestant(Protocol):
    """A learner with its model loaded."""

    def run(self, sequences: Sequence[Sample]) -> Pass:
        """Forward and backward; leaves the gradients."""
        ...

    def gradient_norm(self) -> float:
        """Of all weights. Called after the last pass."""
        ...

    def clear(self) -> None:
        """Forget the gradients."""
        ...


def serve(contestant: Contestant, sequences: Sequence[Sample], say: Callable[[Mapping[str, Any]], None]) -> None:
    """Warm up, and then obey ``round`` and ``check`` until the input ends."""
    contestant.run([min(sequences, key=lambda one: len(one.tokens))])
    own_mib = _begin_peak()
    say({"own_mib": own_mib})
    for command in sys.stdin:
        if command.strip() == "round":
            contestant.clear()
            started, cpu = time.perf_counter(), time.process_time()
            contestant.run(sequences)
            seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
            say({"seconds": seconds, "cpu_s": cpu_s, "peak_mib": _peak_mib() - own_mib})
        else:
            contestant.clear()
            said = contestant.run(sequences)
            norm = contestant.gradient_norm()
            logprobs = None if said.logprobs is None else [float(one) for one in said.logprobs]
            say({"loss": said.loss, "logprobs": logprobs, "entropy": said.entropy, "gradient_norm": norm})


def _begin_peak() -> float:
    """Give free memory back, begin the peak anew where the system can, and return what is resident, in MiB."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        print("the peak so far counts as the model's own: it cannot be reset here", file=sys.stderr)
    return _peak_mib()


def _peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _load(name: str, model: Path, threads: int) -> Contestant:
    from benchmarks.learners import anchors, ours, plain

    makers: Mapping[str, Callable[[], Contestant]] = {
        "ours": lambda: ours.Ours(model, threads=threads),
        "eager": lambda: plain.Eager(model),
        "keep": lambda: plain.Keep(model),
        "liger": lambda: anchors.Liger(model),
        "trl": lambda: anchors.TRLStep(model),
        "tree": lambda: anchors.TRLTree(model),
    }
    return makers[name]()


def main() -> None:
    name, workload, model, threads, *quick = sys.argv[1:]
    # Libraries print to the standard output, which is the answers' alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(int(threads))
    contestant = _load(name, Path(model), int(threads))
    serve(contestant, samples(workload, QUICK if quick else FULL), lambda said: print(json.dumps(said), file=answers))


if __name__ == "__main__":
    main()
