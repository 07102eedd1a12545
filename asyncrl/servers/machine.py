"""What the process was given by its machine: folders, GPUs, programs.

The environment is read here, and nowhere else.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from platformdirs import user_cache_path

from asyncrl.errors import ConfigError

__all__ = ["cache_directory", "has_module", "program", "read_secret", "visible_gpus"]


def cache_directory() -> Path:
    """Where models made by ``model.source`` and the environment of the CPU server are kept."""
    return user_cache_path("asyncrl")


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))
    found = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return tuple(str(number) for number in sorted(int(name) for name in found if name.isdigit()))


def has_module(name: str) -> bool:
    """True if this interpreter can import the top-level module ``name``; it is not imported."""
    return importlib.util.find_spec(name) is not None


def program(name: str) -> str | None:
    """Path of a program that is beside this interpreter or on the path, None if there is none."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def read_secret(key: str, variable: str) -> str:
    """The value of an environment variable whose name stands at ``key``; ``ConfigError`` if it is not set."""
    secret = os.environ.get(variable)
    if not secret:
        raise ConfigError.for_value(key, variable, "the name of an environment variable that is set")
    return secret
