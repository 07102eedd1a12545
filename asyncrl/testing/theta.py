"""The smallest model there is: one number, theta, that scripted servers and a scripted learner agree about.

A published folder holds the number. The model draws every token from the same distribution, whatever came before:
log-probabilities are a function of the token, theta and the temperature, so that a test sees which weights answered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import orjson

from asyncrl.testing.scripted import ScriptedLearner
from asyncrl.types import FloatArray, IntArray

__all__ = [
    "VOCABULARY",
    "ThetaLearner",
    "draw_token",
    "find_theta",
    "find_theta_in",
    "read_theta",
    "theta_distribution",
    "theta_logprobs",
    "write_theta",
]

VOCABULARY = 256
"""What is drawn is below it. A larger id, which only a prompt or a script has, counts as its lowest byte."""

_FILE = "theta.json"
_GREEDY_BELOW = 1e-6
_NAMED = re.compile(rb"theta:(-?\d+(?:\.\d+)?(?:e-?\d+)?)")


def write_theta(folder: Path, theta: float) -> None:
    """Write what a learner exports."""
    (folder / _FILE).write_bytes(orjson.dumps({"theta": theta}))


def read_theta(folder: Path) -> float:
    """Read what a learner exported."""
    return float(orjson.loads((folder / _FILE).read_bytes())["theta"])


def find_theta_in(folder: Path) -> float | None:
    """The number in ``folder``, None if it is not one that a server can load."""
    return read_theta(folder) if (folder / _FILE).is_file() else None


def find_theta(content: Iterable[bytes]) -> float | None:
    """The number in the name of a tensor, ``theta:0.25``, wherever it stands; None if there is none.

    This is how a server learns theta from tensors that it never reads.
    """
    found = (_NAMED.search(part) for part in content)
    return next((float(match[1]) for match in found if match), None)


@lru_cache(maxsize=1024)
def theta_distribution(theta: float, temperature: float = 1.0) -> FloatArray:
    """(V,) log-probabilities of all ids. Greedy sampling, temperature 0, has those of temperature 1, as in SGLang."""
    ids = np.arange(VOCABULARY, dtype=np.float64)
    logits = 2 * np.sin(1.3 * ids) + theta * np.cos(0.9 * ids + 0.5)
    if temperature >= _GREEDY_BELOW:
        logits /= temperature
    logits -= logits.max()
    logprobs: FloatArray = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    logprobs.setflags(write=False)
    return logprobs


def theta_logprobs(tokens: Sequence[int] | IntArray, theta: float, *, temperature: float = 1.0) -> FloatArray:
    """(T,) log-probabilities of ``tokens``, whether sampled or scored; what a server scores has temperature 1."""
    chosen: FloatArray = theta_distribution(theta, temperature)[np.asarray(tokens, dtype=np.int64) % VOCABULARY]
    return chosen


def draw_token(
    theta: float, uniform: float, *, temperature: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    """One token; ``uniform`` is the draw in [0, 1)."""
    logprobs = theta_distribution(theta, temperature)
    if temperature < _GREEDY_BELOW:
        return int(logprobs.argmax())
    order = np.argsort(-logprobs, kind="stable")
    chances = np.exp(logprobs[order].astype(np.float64))
    keep = (chances >= min_p * chances[0]) & (chances.cumsum() - chances < top_p)
    if top_k >= 1:
        keep[top_k:] = False
    totals = np.where(keep, chances, 0.0).cumsum()
    place = int(np.searchsorted(totals, uniform * totals[-1], side="right"))
    return int(order[min(place, VOCABULARY - 1)])


class ThetaLearner(ScriptedLearner):
    """A scripted learner whose parameters are ``theta``."""

    def __init__(self, *, theta: float = 0.0, lora_rank: int | None = 8) -> None:
        super().__init__(lora_rank=lora_rank)
        self.theta = theta

    async def export(self, directory: Path) -> None:
        """Write the number."""
        write_theta(directory, self.theta)

    async def weights(self) -> Mapping[str, FloatArray]:
        """One tensor, whose name is the number."""
        return {f"theta:{self.theta}": np.zeros(1, dtype=np.float32)}

    async def logprobs(self, tokens: IntArray, *, start: int, temperature: float) -> FloatArray:
        """What a server at this theta reports."""
        return theta_logprobs(tokens[start:], self.theta, temperature=temperature)
