"""A workload from distributions, for a run that never was."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.simulation.cost import Cost, LoadModel
from asyncrl.simulation.grid import RunOptions
from asyncrl.simulation.workload import GroupScript, MemberScript, TurnScript, Workload

__all__ = ["Distribution", "Durations", "make_workload"]

_SECONDS_PER_TOKEN = 0.02
_PER_REQUEST = 0.01
# Of a token's time, for each further request in flight: at a hundred a token takes twice as long.
_MEAN_OF_BOUND = 0.25
# Mean length of a turn, as a part of what the budget would let it have.
_SIGMA = 0.8
_PUBLICATION = 0.1
# Of the training time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Log-normal with this ``mean``; ``sigma`` is the standard deviation of the logarithm, 0 is a constant."""

    mean: float
    sigma: float = 0.0

    def draw(self, source: random.Random, *, normal: float | None = None) -> float:
        """A value; ``normal`` is the standard normal number that it is made of."""
        z = source.gauss() if normal is None else normal
        return self.mean * math.exp(self.sigma * z - self.sigma**2 / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """What the user said about a run; None is a default that follows from the run's options, see ``make_workload``."""

    turns: int | None = None
    turn_tokens: Distribution | None = None
    seconds_per_token: tuple[float, float] | None = None
    """Of one request alone, and what each further one in flight adds."""
    tool_seconds: Distribution | None = None
    train_seconds: float | None = None
    """Of one step."""
    publish_seconds: float | None = None

    def __post_init__(self) -> None:
        alone, each = self.seconds_per_token or (0.0, 0.0)
        if each > alone:
            text = f"{alone:g}:{each:g}"
            raise ConfigError.for_value("--seconds-per-token", text, "ALONE:EACH with EACH at most ALONE")
        if self.turn_tokens is not None and self.turn_tokens.mean < 1:
            raise ConfigError.for_value("--turn-tokens", self.turn_tokens.mean, "a mean of at least 1")


def make_workload(run: RunOptions, durations: Durations, *, groups: int, seed: int) -> Workload:
    """``groups`` groups of the run's size.

    Defaults: ``budget.max_turns`` turns of a quarter of the tokens that the budget allows each, sigma 0.8; 0.02 seconds
    a token and 1 % of that for each further request in flight; tools of 1 second with sigma 1 between turns; training a
    batch takes as long as sampling it at the run's concurrency, publishing a tenth of that.
    """
    source = random.Random(seed)
    turns = durations.turns or run.budget.max_turns
    tokens = durations.turn_tokens or Distribution(
        mean=max(1.0, _MEAN_OF_BOUND * _turn_bound(run, turns)), sigma=_SIGMA
    )
    base, per_request = durations.seconds_per_token or (_SECONDS_PER_TOKEN, _SECONDS_PER_TOKEN * _PER_REQUEST)
    tools = durations.tool_seconds or Distribution(mean=1.0, sigma=1.0)
    _, groups_per_step, group_size = run.shape
    sequences = groups_per_step * group_size
    train_s = durations.train_seconds
    if train_s is None:
        train_s = sequences * turns * tokens.mean * (base / run.schedule.concurrency + per_request)
    publish_s = _PUBLICATION * train_s if durations.publish_seconds is None else durations.publish_seconds
    return Workload(
        groups=[_group(source, group_size, turns, tokens, tools) for _ in range(groups)],
        sampling=LoadModel(own=(0.0, base - per_request, 0.0), shared=(0.0, per_request, 0.0)),
        training=Cost(coefficients=(0.0, train_s / sequences, 0.0)),
        optimizer=Cost(coefficients=(0.0,)),
        staging=Cost(coefficients=(0.0,)),
        publication=LoadModel(own=(publish_s,), shared=(0.0,)),
    )


def _turn_bound(run: RunOptions, turns: int) -> float:
    share = run.budget.max_generated_tokens / turns
    return share if run.budget.max_turn_tokens is None else min(share, run.budget.max_turn_tokens)


def _group(source: random.Random, size: int, turns: int, tokens: Distribution, tools: Distribution) -> GroupScript:
    """Half of the variance of the logarithm of lengths is the row's: hard rows are long for all members."""
    row = source.gauss()
    members = []
    for _ in range(size):
        lengths = [tokens.draw(source, normal=(row + source.gauss()) / math.sqrt(2)) for _ in range(turns)]
        members.append(
            MemberScript(
                turns=tuple(
                    TurnScript(
                        new_tokens=1,
                        uncached_tokens=1,
                        tokens=max(1, round(length)),
                        reply_s=tools.draw(source) if place < turns - 1 else 0.0,
                    )
                    for place, length in enumerate(lengths)
                ),
                reward=source.random(),
            )
        )
    return GroupScript(members=tuple(members))
