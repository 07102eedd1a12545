"""The smallest model there is: one number, theta, that scripted servers and a scripted learner agree about.

A published folder holds the number; log-probabilities are a simple function of it, so that a test sees which weights
answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson

from asyncrl.testing.scripted import ScriptedLearner
from asyncrl.types import FloatArray, IntArray

__all__ = ["ThetaLearner", "holds_theta", "read_theta", "theta_logprobs", "write_theta"]

_FILE = "theta.json"


def write_theta(folder: Path, theta: float) -> None:
    """Write what a learner exports."""
    (folder / _FILE).write_bytes(orjson.dumps({"theta": theta}))


def holds_theta(folder: Path) -> bool:
    """True if ``folder`` is one that a server can load."""
    return (folder / _FILE).is_file()


def read_theta(folder: Path) -> float:
    """Read what a learner exported."""
    return float(orjson.loads((folder / _FILE).read_bytes())["theta"])


def theta_logprobs(tokens: Sequence[int] | IntArray, theta: float) -> FloatArray:
    """(T,) log-probabilities of ``tokens``, whether sampled or scored."""
    return (-1.0 - np.asarray(tokens) / 1000 - theta).astype(np.float32)


class ThetaLearner(ScriptedLearner):
    """A scripted learner whose parameters are ``theta``."""

    def __init__(self, *, theta: float = 0.0, lora_rank: int | None = 8) -> None:
        super().__init__(lora_rank=lora_rank)
        self.theta = theta

    async def export(self, directory: Path) -> None:
        """Write the number."""
        write_theta(directory, self.theta)

    async def logprobs(self, tokens: IntArray, *, start: int, temperature: float) -> FloatArray:
        """What a server at this theta reports."""
        return theta_logprobs(tokens[start:], self.theta)
