from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.simulation.options import Distribution, Durations, SimulationOptions, read_options

_FLAGS = (
    "run_directory",
    "max_staleness",
    "admit_ahead",
    "concurrency",
    "oversample",
    "turns",
    "turn_tokens",
    "seconds_per_token",
    "tool_seconds",
    "train_seconds",
    "publish_seconds",
    "steps",
    "seed",
    "picture",
    "no_picture",
)


def _read(folder: Path, **given: Any) -> SimulationOptions:
    return read_options({**dict.fromkeys(_FLAGS), **given}, folder.name)


def test_texts_become_values(tmp_path: Path) -> None:
    """Each flag in its own form."""
    options = _read(
        tmp_path,
        max_staleness="0,1,2",
        oversample="1,1.5",
        turns="3",
        turn_tokens="200:0.8",
        seconds_per_token="0.02:0.0001",
        tool_seconds="1.5",
        train_seconds="30",
        steps="7",
        seed="0",
        picture=tmp_path / "a.png",
    )
    assert options.axes == {"max_staleness": (0, 1, 2), "oversample_factor": (1.0, 1.5)}
    assert options.durations == Durations(
        turns=3,
        turn_tokens=Distribution(mean=200.0, sigma=0.8),
        seconds_per_token=(0.02, 0.0001),
        tool_seconds=Distribution(mean=1.5),
        train_seconds=30.0,
    )
    assert (options.steps, options.seed, options.picture) == (7, 0, tmp_path / "a.png")


def test_nothing_given_leaves_everything_to_the_recipe(tmp_path: Path) -> None:
    """But for a picture, named after the recipe's folder."""
    options = _read(tmp_path)
    assert options == SimulationOptions(durations=Durations(), picture=Path(f"{tmp_path.name}-simulation.svg"))
    assert options.axes == {}
    assert _read(tmp_path, no_picture=True).picture is None


@pytest.mark.parametrize(
    ("flag", "text", "allowed"),
    [
        ("max_staleness", "1,x", "integers with commas"),
        ("max_staleness", "1.5", "integers with commas"),
        ("oversample", "", "numbers with commas"),
        ("turns", "0", "an integer of at least 1"),
        ("steps", "many", "an integer of at least 1"),
        ("seed", "-1", "an integer of at least 0"),
        ("turn_tokens", "100:0.8:3", "MEAN or MEAN:SIGMA"),
        ("turn_tokens", "nan", "MEAN or MEAN:SIGMA"),
        ("seconds_per_token", "-1", "numbers of at least 0"),
        ("train_seconds", "1:2", "a number of at least 0"),
        ("picture", Path("plot.jpeg"), "ends in .svg or .png"),
        ("picture", Path("no/such/folder/plot.svg"), "in a folder that exists"),
    ],
)
def test_unknown_values_are_refused_with_their_key(tmp_path: Path, flag: str, text: object, allowed: str) -> None:
    """Before anything is read or simulated."""
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} is .*{allowed}"):
        _read(tmp_path, **{flag: text})


def test_a_recorded_run_brings_its_own_durations(tmp_path: Path) -> None:
    """A flag that would be ignored is refused."""
    with pytest.raises(ConfigError, match="--from takes all durations from the run"):
        _read(tmp_path, run_directory=tmp_path, train_seconds="3")
