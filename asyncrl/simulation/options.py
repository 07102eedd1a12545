"""The options of ``asyncrl simulate``: a flag for each field, read from the texts of the command line."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from asyncrl.errors import ConfigError
from asyncrl.flags import add_flags
from asyncrl.servers.machine import has_module

__all__ = ["NO_MATPLOTLIB", "Distribution", "Durations", "SimulationOptions", "add_simulation_flags", "read_options"]


_PAIR = "one or two numbers of at least 0, as in 0.02:0.0002"
_SIGMA = "MEAN or MEAN:SIGMA, numbers of at least 0"
NO_MATPLOTLIB = "a picture needs matplotlib, which `pip install 'asyncrl[plot]'` adds"


@dataclass(frozen=True, slots=True)
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
    """turns of a trajectory (default: budget.max_turns)"""
    turn_tokens: Distribution | None = None
    """sampled tokens of a turn, log-normal (default: a quarter of the turn's budget, 0.8)"""
    seconds_per_token: tuple[float, float] | None = None
    """of a request alone, and more for each other in flight (default: 0.02:0.0002)"""
    tool_seconds: Distribution | None = None
    """the environment's answer between turns, log-normal (default: 1:1)"""
    train_seconds: float | None = None
    """training a batch (default: as long as sampling its tokens takes)"""
    publish_seconds: float | None = None
    """making a version live (default: a tenth of the training)"""

    def __post_init__(self) -> None:
        alone, each = self.seconds_per_token or (0.0, 0.0)
        if each > alone:
            text = f"{alone:g}:{each:g}"
            raise ConfigError.for_value("--seconds-per-token", text, "ALONE:EACH with EACH at most ALONE")
        if self.turn_tokens is not None and self.turn_tokens.mean < 1:
            raise ConfigError.for_value("--turn-tokens", self.turn_tokens.mean, "a mean of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What the command line says beside the recipe."""

    run_directory: Path | None = None
    """A finished run to take the workload from, else ``durations``."""
    max_staleness: tuple[int, ...] | None = None
    """bounds to compare (this and the next three: a grid; default: around the recipe)"""
    admit_ahead: tuple[int, ...] | None = None
    """future batches admitted"""
    concurrency: tuple[int, ...] | None = None
    """active trajectories"""
    oversample: tuple[float, ...] | None = None
    """oversample factors"""
    durations: Durations
    steps: int | None = None
    """steady steps of each point (default: as many as take some 10 seconds in all)"""
    seed: int = 0
    """of every random choice (default: 0)"""
    picture: Path | None = None
    """svg or png (default: FOLDER-simulation.svg, of the recipe's folder)"""

    def __post_init__(self) -> None:
        if self.run_directory is not None and self.durations != Durations():
            raise ConfigError("--from takes all durations from the run: leave --turns, --turn-tokens and the like out")

    @property
    def axes(self) -> dict[str, tuple[float, ...]]:
        """The values that the user gave, by the names of a point's fields; none leaves it to a default grid."""
        given = {name: getattr(self, name) for name in ("max_staleness", "admit_ahead", "concurrency")}
        return {name: values for name, values in (given | {"oversample_factor": self.oversample}).items() if values}


def add_simulation_flags(parser: argparse.ArgumentParser) -> None:
    """Numbers stay text in them: ``read_options`` reads them, and its errors name the flag and what is allowed."""
    parser.add_argument(
        "--from", dest="run_directory", type=Path, metavar="DIR", help="replay a finished run, from its events.jsonl"
    )
    for kind in (Durations, SimulationOptions):
        add_flags(parser, kind, _written(kind), forms={hint: form for hint, (form, _) in _FORMS.items()})
    picture = parser.add_mutually_exclusive_group()
    add_flags(picture, SimulationOptions, ("picture",))
    picture.add_argument("--no-picture", action="store_true", help="draw none")


def read_options(arguments: Mapping[str, Any], name: str) -> SimulationOptions:
    """The texts of the command line, by the names of the fields, as values. Raises ``ConfigError``.

    ``name``: of the default picture; ``no_picture`` among the arguments leaves it out.
    """
    chosen = arguments.get("picture")
    picture = None if arguments["no_picture"] else chosen or Path(f"{name}-simulation.svg")
    if chosen is not None and not has_module("matplotlib"):
        raise ConfigError.for_value("--picture", str(picture), f"left out: {NO_MATPLOTLIB}")
    return SimulationOptions(
        run_directory=arguments["run_directory"],
        picture=picture if picture is None else _picture(picture),
        durations=Durations(**_read(Durations, arguments)),
        **_read(SimulationOptions, arguments),
    )


def _written(kind: type) -> dict[str, Any]:
    """The types of the fields of ``kind`` that are given as texts."""
    return {name: hint for name, hint in get_type_hints(kind).items() if hint in _FORMS}


def _read(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``kind`` that were given."""
    given = {name: hint for name, hint in _written(kind).items() if arguments.get(name) is not None}
    return {name: _FORMS[hint][1](f"--{name.replace('_', '-')}", arguments[name]) for name, hint in given.items()}


def _count(key: str, text: str, *, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigError.for_value(key, text, f"an integer of at least {least}")
    return value


def _list(kind: type[float], allowed: str, key: str, text: str) -> tuple[float, ...]:
    """``0,1,2``"""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError.for_value(key, text, f"{allowed} with commas between them") from None


def _numbers(most: int, allowed: str, key: str, text: str) -> list[float]:
    """``FIRST:SECOND``, at most so many."""
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 0 < len(numbers) <= most or not all(0 <= number < math.inf for number in numbers):
        raise ConfigError.for_value(key, text, allowed)
    return numbers


def _picture(path: Path) -> Path:
    """A file that can be written: better known before anything is simulated."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError.for_value("--picture", str(path), "a file name that ends in .svg or .png")
    if not path.resolve().parent.is_dir():
        raise ConfigError.for_value("--picture", str(path), "in a folder that exists")
    return path


_FORMS: Mapping[Any, tuple[str, Callable[[str, str], Any]]] = {
    int: ("N", partial(_count, least=0)),
    int | None: ("N", _count),
    float | None: ("X", lambda *text: _numbers(1, "a number of at least 0", *text)[0]),
    tuple[float, float] | None: ("ALONE[:EACH]", lambda *text: (*_numbers(2, _PAIR, *text), 0.0)[:2]),
    tuple[int, ...] | None: ("N,..", partial(_list, int, "integers")),
    tuple[float, ...] | None: ("X,..", partial(_list, float, "numbers")),
    Distribution | None: ("MEAN[:SIGMA]", lambda *text: Distribution(*_numbers(2, _SIGMA, *text))),
}
"""What the text of a flag looks like, by the type of its field, and what reads it."""
