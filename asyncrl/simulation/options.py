"""The options of ``asyncrl simulate``: read from what the user wrote, every error with its key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.simulation.grid import Axes, RunOptions
from asyncrl.simulation.synthetic import Distribution, Durations

__all__ = ["SimulationOptions", "read_options"]

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What the command line says beside the recipe."""

    run_directory: Path | None = None
    """A finished run to take the workload from, else ``durations``."""
    durations: Durations
    axes: Axes
    """Without values: a default grid."""
    steps: int | None = None
    """Steady steps of each point."""
    seed: int = 0
    picture: Path | None = None
    """Where it is written; None: nowhere."""

    def __post_init__(self) -> None:
        if self.run_directory is not None and self.durations != Durations():
            raise ConfigError("--from takes all durations from the run: leave --turns, --turn-tokens and the like out")


def read_options(arguments: Mapping[str, Any], run: RunOptions) -> SimulationOptions:
    """The texts of the command line, by the names of their flags, as values. Raises ``ConfigError``."""
    return SimulationOptions(
        run_directory=arguments["run_directory"],
        durations=Durations(
            turns=_count("--turns", arguments["turns"]),
            turn_tokens=_distribution("--turn-tokens", arguments["turn_tokens"]),
            seconds_per_token=_pair("--seconds-per-token", arguments["seconds_per_token"]),
            tool_seconds=_distribution("--tool-seconds", arguments["tool_seconds"]),
            train_seconds=_number("--train-seconds", arguments["train_seconds"]),
            publish_seconds=_number("--publish-seconds", arguments["publish_seconds"]),
        ),
        axes=Axes(
            max_staleness=_list("--max-staleness", arguments["max_staleness"], int),
            admit_ahead=_list("--admit-ahead", arguments["admit_ahead"], int),
            concurrency=_list("--concurrency", arguments["concurrency"], int),
            oversample_factor=_list("--oversample", arguments["oversample"], float),
        ),
        steps=_count("--steps", arguments["steps"]),
        seed=_count("--seed", arguments["seed"], least=0) or 0,
        picture=None
        if arguments["no_picture"]
        else _picture(arguments["picture"] or Path(f"{run.name}-simulation.svg")),
    )


def _count(key: str, text: str | None, *, least: int = 1) -> int | None:
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigError.for_value(key, text, f"an integer of at least {least}")
    return value


def _list(key: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...] | None:
    """``0,1,2``"""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        allowed = "integers" if kind is int else "numbers"
        raise ConfigError.for_value(key, text, f"{allowed} with commas between them") from None


def _number(key: str, text: str | None) -> float | None:
    return None if text is None else _numbers(key, text, most=1, allowed="a number of at least 0")[0]


def _pair(key: str, text: str | None) -> tuple[float, float] | None:
    """``FIRST:SECOND``, the second 0 if it is left out."""
    if text is None:
        return None
    first, *rest = _numbers(key, text, most=2, allowed="one or two numbers of at least 0, as in 0.02:0.0002")
    return first, rest[0] if rest else 0.0


def _distribution(key: str, text: str | None) -> Distribution | None:
    """``MEAN:SIGMA``, a constant without sigma."""
    if text is None:
        return None
    mean, *sigma = _numbers(key, text, most=2, allowed="MEAN or MEAN:SIGMA, numbers of at least 0")
    return Distribution(mean=mean, sigma=sigma[0] if sigma else 0.0)


def _picture(path: Path) -> Path:
    """A file that can be written: better known before anything is simulated."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError.for_value("--picture", str(path), "a file name that ends in .svg or .png")
    if not path.resolve().parent.is_dir():
        raise ConfigError.for_value("--picture", str(path), "in a folder that exists")
    return path


def _numbers(key: str, text: str, *, most: int, allowed: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 0 < len(numbers) <= most or not all(0 <= number < math.inf for number in numbers):
        raise ConfigError.for_value(key, text, allowed)
    return numbers
