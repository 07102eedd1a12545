"""What things cost in seconds, as functions of their size, fitted to measurements.

A cost is linear with coefficients that are not negative: nothing becomes quicker by having more to do, and a fit to a
run with little variety does not invent it. What the line leaves unexplained is kept as ratios measured / predicted,
which are drawn from a ``ShuffledRatios``, so that simulated times have the measured spread and tail.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Cost", "InFlight", "LoadModel", "ShuffledRatios", "fit_cost", "fit_load"]

Array: TypeAlias = npt.NDArray[np.float64]

_RATIOS = 8
_LOAD_RATIOS = 1024
# Kept of a fit: means of as many parts of the measured ratios, in their order of size.
_SPEEDS = tuple(0.8**power for power in range(16))
_CLEARLY = 0.99
# How much of the spread may be left for another speed than 1.


class ShuffledRatios:
    """Owns the order in which measured ratios are drawn: shuffled, and none again before all were drawn.

    So the mean over a few draws is already the measured one, and a simulated run of a few dozen steps is not a matter
    of luck. The first ``lead`` draws are the mean, so that rounds begin where steps begin to count.
    """

    def __init__(self, ratios: Sequence[float], source: random.Random, *, lead: int = 0) -> None:
        self._ratios = list(ratios)
        self._random = source
        self._left = [1.0] * lead

    def draw(self) -> float:
        """The next ratio."""
        if not self._left:
            self._left = self._ratios.copy()
            self._random.shuffle(self._left)
        return self._left.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of the trainer's work: ``coefficients`` times its sizes, times one of ``ratios`` (their mean is 1)."""

    coefficients: tuple[float, ...]
    ratios: tuple[float, ...] = (1.0,)
    speed: float = 1.0
    """At which it works while sampling requests are in flight, if it shares a machine with them; 1 is undisturbed."""

    def seconds(self, *sizes: float) -> float:
        """The expected seconds while no request is in flight."""
        return _dot(self.coefficients, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """Seconds of what the sampling servers do, by its size and by how many requests are in flight meanwhile.

    ``seconds = own . sizes + in_flight * shared . sizes``. The first part is what it takes on an idle server: latency,
    a decoding step for each token. The second is processor sharing: of ``n`` requests in flight each gets one n-th of
    what is left, so that ``1 / (shared . sizes)`` requests a second is the most that the servers can do.
    """

    own: tuple[float, ...]
    shared: tuple[float, ...]
    ratios: tuple[float, ...] = (1.0,)
    """Of both parts together; their mean is 1."""

    def parts(self, *sizes: float) -> tuple[float, float]:
        """Own and shared seconds."""
        return _dot(self.own, sizes), _dot(self.shared, sizes)


def fit_cost(sizes: Array, seconds: Array, *, busy: Array) -> Cost:
    """The cost of work that took ``seconds`` (N,) for ``sizes`` (N, K), K of at most about 8; nothing if N is 0.

    ``busy`` (N,): the part of each time in which requests were in flight. Of all speeds the one is chosen at which
    measured and expected times agree best, in the logarithm; full speed unless another one is clearly better.
    """
    fits = [_fit(sizes, seconds * (1 - busy + busy * speed)) for speed in _SPEEDS]
    best = min(range(len(fits)), key=lambda place: fits[place].spread)
    if fits[best].spread > _CLEARLY * fits[0].spread:
        best = 0
    return Cost(
        coefficients=tuple(fits[best].coefficients.tolist()),
        ratios=_parts(fits[best].ratios, _RATIOS),
        speed=_SPEEDS[best],
    )


def fit_load(sizes: Array, seconds: Array, in_flight: Array) -> LoadModel:
    """What the servers do, with so many requests ``in_flight`` (N,) in the mean meanwhile; see ``fit_cost``."""
    count = sizes.shape[1]
    fit = _fit(np.concatenate([sizes, sizes * in_flight[:, None]], axis=1), seconds)
    own, shared = fit.coefficients[:count], fit.coefficients[count:]
    return LoadModel(own=tuple(own.tolist()), shared=tuple(shared.tolist()), ratios=_parts(fit.ratios, _LOAD_RATIOS))


class InFlight:
    """How many of the requests that were open from ``started`` (N,) to ``ended`` (N,) were so at the same time."""

    def __init__(self, started: Array, ended: Array) -> None:
        times = np.concatenate([started, ended])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        count = np.cumsum(np.where(order < len(started), 1, -1))
        self._area = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(self._times))])
        self._busy = np.concatenate([[0.0], np.cumsum((count[:-1] > 0) * np.diff(self._times))])

    def mean(self, started: Array, ended: Array) -> Array:
        """(M,) the mean during other intervals."""
        return self._during(self._area, started, ended)

    def busy(self, started: Array, ended: Array) -> Array:
        """(M,) the part of other intervals in which there was any."""
        return self._during(self._busy, started, ended)

    def _during(self, integral: Array, started: Array, ended: Array) -> Array:
        if not len(self._times):
            return np.zeros(len(started))
        difference = np.interp(ended, self._times, integral) - np.interp(started, self._times, integral)
        return np.asarray(difference / (ended - started))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    coefficients: Array
    """(K,) not negative; what they expect sums up to what was measured."""
    ratios: Array
    """(N,) measured over expected."""

    @property
    def spread(self) -> float:
        """Of the ratios, in the logarithm."""
        return float(np.log(self.ratios).std()) if len(self.ratios) else 0.0


def _fit(sizes: Array, seconds: Array) -> _Fit:
    """Non-negative least squares; ``seconds`` are positive."""
    coefficients = _non_negative(sizes, seconds)
    expected = sizes @ coefficients
    if len(seconds):
        coefficients *= seconds.sum() / expected.sum()
        expected *= seconds.sum() / expected.sum()
    positive = expected > 0
    return _Fit(coefficients=coefficients, ratios=seconds[positive] / expected[positive])


def _non_negative(features: Array, seconds: Array) -> Array:
    """(K,) non-negative least squares.

    At the optimum the features with a positive coefficient, alone, have these coefficients as their plain least squares
    solution; with so few features every choice of them can be tried, the smaller ones first.
    """
    count = features.shape[1]
    norms = np.maximum(np.linalg.norm(features, axis=0), np.finfo(np.float64).tiny)
    scaled = features / norms
    gram, moment = scaled.T @ scaled, scaled.T @ seconds
    best, least = np.zeros(count), 0.0
    # The squared error, but for a constant.
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = np.array(chosen)
            solution = np.linalg.lstsq(gram[np.ix_(part, part)], moment[part], rcond=None)[0]
            error = float(-solution @ moment[part])
            if (solution >= 0).all() and error < least - 1e-9 * abs(least):
                best, least = np.zeros(count), error
                best[part] = solution
    return np.asarray(best / norms)


def _parts(ratios: Array, count: int) -> tuple[float, ...]:
    """Means of at most ``count`` equal parts of the ratios in their order of size, over the mean of these."""
    if not len(ratios):
        return (1.0,)
    parts = np.array([part.mean() for part in np.array_split(np.sort(ratios), min(count, len(ratios)))])
    return tuple((parts / parts.mean()).tolist())


def _dot(coefficients: Sequence[float], sizes: Sequence[float]) -> float:
    return math.fsum(coefficient * size for coefficient, size in zip(coefficients, sizes, strict=True))
