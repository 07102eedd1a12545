"""The environment of the CPU server: SGLang and all that it needs, pinned, apart from everything else.

SGLang pins torch and a hundred other packages, so it never shares our interpreter. What is made is a virtual
environment of the running Python; it counts as complete when its last file is written. On a machine with a GPU it is
not needed: there SGLang is installed as its authors say, or with ``pip install asyncrl[sglang]``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.servers.machine import cache_directory
from asyncrl.servers.packages import find_uv, one_at_a_time, run_installer

__all__ = ["SGLANG_VERSION", "Installed", "commands", "install_sglang", "installed_python", "sglang_directory"]

SGLANG_VERSION = "0.5.23"
"""The version whose HTTP interface the client speaks, and that the tests run against."""

_REQUIREMENTS = Path(__file__).with_name("sglang-cpu.txt")
_BEGUN = "asyncrl-begun"
_COMPLETE = "asyncrl-complete.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment that is complete."""

    python: Path
    directory: Path
    made: bool
    """False if it was there already."""
    seconds: float


def sglang_directory() -> Path:
    """Where the environment of this Python version is, if no other place is named."""
    return cache_directory() / f"sglang-{SGLANG_VERSION}-cpu-py{sys.version_info[0]}{sys.version_info[1]}"


def installed_python(directory: Path | None = None) -> Path | None:
    """The interpreter of the environment in ``directory``; None if it is not complete or of other versions."""
    directory = directory or sglang_directory()
    python = directory / "bin" / "python"
    try:
        complete = json.loads((directory / _COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return python if complete == _identity() and python.exists() else None


def install_sglang(directory: Path | None = None, *, say: Callable[[str], None]) -> Installed:
    """Make the environment, unless it is there; blocks for a minute or more. Progress goes to ``say`` and to stderr.

    Raises ``ConfigError`` if ``directory`` holds something else, ``ServerUnavailable`` if a package cannot be had.
    """
    directory = (directory or sglang_directory()).absolute()
    started = time.monotonic()
    python = installed_python(directory)
    made = False
    if python is None:
        with one_at_a_time(directory, say):
            # Another process may have made it while this one waited.
            python = installed_python(directory)
            if python is None:
                python, made = _make(directory, say), True
    return Installed(python=python, directory=directory, made=made, seconds=time.monotonic() - started)


def _make(directory: Path, say: Callable[[str], None]) -> Path:
    if directory.exists() and any(directory.iterdir()):
        if not (directory / _BEGUN).exists():
            raise ConfigError.for_value(
                "--directory", str(directory), "a new or empty folder, or one made by this command"
            )
        say(f"{directory} is half made or of other versions; making it anew")
        shutil.rmtree(directory)
    directory.mkdir(exist_ok=True)
    (directory / _BEGUN).touch()
    python = directory / "bin" / "python"
    say(f"installing SGLang {SGLANG_VERSION} for the CPU into {directory}: some gigabytes, a minute or more")
    for command in commands(directory, uv=find_uv()):
        # Not in a checkout, whose pyproject.toml would have a say in it.
        run_installer(command, directory)
    (directory / _COMPLETE).write_text(json.dumps(_identity()), encoding="utf-8")
    return python


def commands(directory: Path, *, uv: Sequence[str] | None) -> list[list[str]]:
    """What is run, in order: with ``uv`` if there is one, else with the modules that Python brings.

    Each start of the server imports some thousand files, so all are compiled now.
    """
    python, requirements = str(directory / "bin" / "python"), str(_REQUIREMENTS)
    if uv is not None:
        return [
            [*uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(directory)],
            [*uv, "pip", "install", "--python", python, "--no-deps", "--compile-bytecode", "-r", requirements],
        ]
    return [
        [sys.executable, "-m", "venv", str(directory)],
        [python, "-m", "pip", "install", "--no-deps", "--compile", "--progress-bar", "off", "-r", requirements],
    ]


def _identity() -> dict[str, str]:
    """What an environment was made of; it is made anew when this changes."""
    digest = hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()
    return {"requirements": digest, "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
