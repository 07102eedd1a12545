"""Trained weights as people name them: a run directory, an adapter folder, or a model folder.

Of a run the versions that it has published are in ``adapters/``, the newest ones only. Reading them disturbs nobody:
a run that goes on may remove one meanwhile, which is an error that says so. Blocking.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from asyncrl.checkpoint.directory import read_origin
from asyncrl.checkpoint.folders import has_run
from asyncrl.errors import ConfigError
from asyncrl.files import emptied, numbered, version_folder
from asyncrl.learning.adapterfolder import is_adapter, read_adapter_config
from asyncrl.learning.modelfolder import find_model
from asyncrl.plain import shown

__all__ = ["Trained", "base_name", "copied", "find_trained", "hub_name", "recipe_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Weights in ``folder``: an adapter in PEFT's format, or a whole model."""

    folder: Path
    is_adapter: bool
    run: Path | None = None
    """The run directory that they are in."""
    version: int = 0
    """Of the run."""

    def base_model(self) -> Path:
        """The folder of the model below the adapter, of whole weights that of the weights. Raises ``ConfigError``."""
        if not self.is_adapter:
            return self.folder
        base = str(read_adapter_config(self.folder, "adapter").get("base_model_name_or_path"))
        return find_model(base, key=f"the base model of {self.folder}")

    def overrides(self) -> list[str]:
        """What ``--set`` says of a recipe that starts from these weights."""
        where = orjson.dumps(str(self.folder.resolve())).decode()
        if self.is_adapter:
            return [f"model.adapter={where}"]
        return ["model.source=", f"model.path={where}"]


def find_trained(place: Path, version: int | None, *, key: str) -> Trained:
    """The weights at ``place``; of a run those of ``version``, None is the newest. Raises ``ConfigError``."""
    place = place.expanduser()
    if has_run(place):
        return _of_run(place, version, key)
    if version is not None:
        raise ConfigError.for_value("--version", version, f"left out: {place} is not the folder of a run")
    if is_adapter(place):
        return Trained(folder=place, is_adapter=True)
    try:
        return Trained(folder=find_model(place, key=key), is_adapter=False)
    except ConfigError as error:
        raise ConfigError(f"{error}. It may also be the folder of a run (run.json) or of an adapter") from error


def copied(trained: Trained, folder: Path) -> Trained:
    """A copy of an adapter in the new ``folder``, which nobody else changes."""
    emptied(folder)
    for path in trained.folder.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    return replace(trained, folder=folder)


def recipe_of(run: Path) -> tuple[Path, Sequence[str]]:
    """The recipe or script that ``run`` was started from, and its ``--set`` options. Raises ``ConfigError``."""
    path, overrides = read_origin(run)
    if path is None:
        raise ConfigError(
            f"{run / 'run.json'} does not say which recipe the run is from: name the recipe after the run"
        )
    if not path.is_file():
        raise ConfigError(f"the recipe of {run} was {shown(str(path))}, which is gone: name the recipe after the run")
    return path, overrides


def _of_run(run: Path, version: int | None, key: str) -> Trained:
    folder = run / "adapters"
    versions = (
        [one for one in numbered(folder, "v") if _has_weights(version_folder(folder, one))] if folder.is_dir() else []
    )
    if not versions:
        raise ConfigError.for_value(
            key, str(run), "a run that has published weights on disk (there are none in adapters/)"
        )
    if version is None:
        version = versions[-1]
    elif version not in versions:
        listed = ", ".join(map(str, versions))
        raise ConfigError.for_value("--version", version, f"one that the run still has: {listed}")
    path = version_folder(folder, version)
    return Trained(folder=path, is_adapter=is_adapter(path), run=run, version=version)


def _has_weights(folder: Path) -> bool:
    return is_adapter(folder) or (folder / "config.json").is_file()


def hub_name(model: Path) -> str | None:
    """The name on the Hugging Face hub of a model in its cache; None of any other folder."""
    for name in (*model.parts, *model.resolve().parts):
        if name.startswith("models--"):
            return name.removeprefix("models--").replace("--", "/", 1)
    return None


def base_name(model: Path) -> str:
    """How others call the model in ``model``: its name on the hub if it came from there, else that of its folder."""
    return hub_name(model) or model.resolve().name
