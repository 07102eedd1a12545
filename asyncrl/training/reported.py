"""What the passes of a trainer step reported, and the statistics of its importance ratios.

Symbols: ``r = exp(logp - mu)`` of a trained token, ``logp`` the learner's log-probability in its pass and ``mu`` the
sampler's. All statistics are exact, over every token of every pass of the step, and no matter which loss is used::

    effective sample fraction   (sum r)^2 / (N sum r^2)              (Kong 1992; N tokens, or sequences)
    kl                          mean of r - 1 - log r                (k3 of Schulman 2020; of mu from pi, samples of mu)
    mismatch                    |logp - mu| of tokens of age 0       (before the first update: one policy, two programs)

A sequence has the geometric mean of its tokens' ratios. A percentile is the smallest value that so many do not exceed.
Where no trained token has age 0, which is usual when sampling works ahead, mismatch is that of the youngest age that
there is, and holds what the updates since then have changed, too: ``mismatch/age`` says which age it is.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import anyio.to_thread
import numpy as np
import numpy.typing as npt

from asyncrl.learning.base import ChunkResult, TrainingSequence
from asyncrl.types import FloatArray, IntArray

__all__ = ["StepReport"]

_ON_THE_LOOP = 50_000
# Tokens whose statistics take less than some milliseconds.


class StepReport:
    """Owns what the passes of one step reported: sums, token counts, and log-ratios for the time of the step."""

    def __init__(self) -> None:
        self.tokens = 0
        """Trained tokens, each counted in every pass that it is in."""
        self._input_tokens = 0
        self._computed_tokens = 0
        self._sums: Counter[str] = Counter()
        self._losses: defaultdict[int, float] = defaultdict(float)
        # Update -> weighted loss.
        self._log_ratios: list[FloatArray] = []
        self._tokens_B: list[IntArray] = []
        self._first: list[tuple[Sequence[TrainingSequence], FloatArray]] = []
        # Passes before the first update, whose log-ratios are mismatch.

    def record(self, sequences: Sequence[TrainingSequence], result: ChunkResult, *, update: int = 0) -> None:
        """``result`` is of a pass over ``sequences`` after ``update`` optimizer steps of this trainer step."""
        self.tokens += result.tokens
        self._input_tokens += result.input_tokens
        self._computed_tokens += result.computed_tokens
        sums = dict(result.sums)
        self._losses[update] += sums.pop("loss", 0.0)
        self._sums.update(sums)
        if not len(result.log_ratios):
            return
        self._log_ratios.append(result.log_ratios)
        self._tokens_B.append(np.array([np.count_nonzero(sequence.mask) for sequence in sequences], dtype=np.int32))
        if update == 0:
            self._first.append((sequences, result.log_ratios))

    def losses(self, divisors: Sequence[float]) -> Mapping[str, float]:
        """``loss`` of each update over its divisor, and the mean of these; all else over the trained tokens.

        Empty if nothing was reported.
        """
        if not self._losses:
            return {}
        means = {key: value / max(1, self.tokens) for key, value in self._sums.items()}
        losses = [self._losses[update] / divisor for update, divisor in enumerate(divisors) if update in self._losses]
        return {"loss": statistics.fmean(losses), **means}

    async def metrics(self) -> Mapping[str, float]:
        """Of ratios, mismatch and shared tokens, with the same keys always. A million tokens do not hold the loop."""
        statistics_of = partial(_statistics, self._log_ratios, self._tokens_B, self._first)
        virtual = getattr(asyncio.get_running_loop(), "virtual", False)  # where a thread would take no time, or all
        if self.tokens <= _ON_THE_LOOP or virtual:
            found = statistics_of()
        else:
            found = await anyio.to_thread.run_sync(statistics_of)
        return {
            **found,
            "train/input_tokens": float(self._input_tokens),
            "train/computed_tokens": float(self._computed_tokens),
            "train/sharing_factor": self._input_tokens / self._computed_tokens if self._computed_tokens else 1.0,
        }


def _statistics(
    log_ratios: Sequence[FloatArray],
    tokens_B: Sequence[IntArray],
    first: Sequence[tuple[Sequence[TrainingSequence], FloatArray]],
) -> dict[str, float]:
    ratios = _ratio_metrics(_joined(log_ratios), _joined(tokens_B).astype(np.int64))
    return {**ratios, **_mismatch_metrics(first)}


def _ratio_metrics(log_ratios: npt.NDArray[np.float64], tokens_B: npt.NDArray[np.int64]) -> dict[str, float]:
    if not len(log_ratios):
        names = ("effective_sample_frac", "effective_sequence_frac", "mean", "p99", "max")
        return {f"ratio/{name}": 1.0 for name in names} | {"ratio/kl": 0.0}
    with np.errstate(over="ignore", invalid="ignore"):
        ratios = np.exp(log_ratios)
        tokens_B = tokens_B[tokens_B > 0]
        means_B = np.add.reduceat(log_ratios, np.cumsum(tokens_B) - tokens_B) / tokens_B
        return {
            "ratio/effective_sample_frac": _effective_fraction(log_ratios),
            "ratio/effective_sequence_frac": _effective_fraction(means_B),
            "ratio/mean": float(ratios.mean()),
            "ratio/p99": _percentile(ratios, 99),
            "ratio/max": float(ratios.max()),
            "ratio/kl": float((ratios - 1.0 - log_ratios).mean()),
        }


def _mismatch_metrics(first: Sequence[tuple[Sequence[TrainingSequence], FloatArray]]) -> dict[str, float]:
    ages = _joined([sequence.ages[sequence.mask] for sequences, _ in first for sequence in sequences])
    if not len(ages):
        return {f"mismatch/{name}": 0.0 for name in ("mean", "p99", "max", "age")}
    youngest = ages.min()
    differences = np.abs(_joined([log_ratios for _, log_ratios in first])[ages == youngest])
    return {
        "mismatch/mean": float(differences.mean()),
        "mismatch/p99": _percentile(differences, 99),
        "mismatch/max": float(differences.max()),
        "mismatch/age": float(youngest),
    }


def _joined(arrays: Sequence[FloatArray] | Sequence[IntArray]) -> npt.NDArray[np.float64]:
    return np.concatenate([np.empty(0, dtype=np.float64), *arrays], dtype=np.float64)


def _effective_fraction(log_weights: npt.NDArray[np.float64]) -> float:
    """A common factor of all weights cancels: the largest one is made 1, so that no square overflows."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights * weights).sum() / len(weights))


def _percentile(values: npt.NDArray[np.float64], percent: int) -> float:
    """As ``observe.metrics.percentile``, without sorting all of them."""
    index = math.ceil(percent * len(values) / 100) - 1
    return float(np.partition(values, index)[index])
