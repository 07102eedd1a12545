"""``asyncrl install-sglang`` and ``asyncrl install-smollm``: the commands that fetch packages; nothing else does."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from asyncrl.cli.common import Commands
from asyncrl.observe.console import say

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the commands and their flags."""
    text = "make the environment of SGLang's CPU server (some gigabytes)"
    sglang = commands.add("install-sglang", _install_sglang, text)
    sglang.add_argument("--directory", type=Path, metavar="DIR", help="where (default: in the cache folder)")
    commands.add("install-smollm", _install_smollm, "fetch the model of the arithmetic recipe (90 megabytes)")


def _install_sglang(arguments: argparse.Namespace) -> None:
    from asyncrl.servers.install import install_sglang

    installed = install_sglang(arguments.directory, say=say)
    result = {"python": str(installed.python), "made": installed.made, "seconds": round(installed.seconds, 1)}
    print(json.dumps(result), flush=True)


def _install_smollm(arguments: argparse.Namespace) -> None:
    from asyncrl.servers.smollm import install_smollm

    started = time.monotonic()
    file, made = install_smollm(say=say)
    print(json.dumps({"file": str(file), "made": made, "seconds": round(time.monotonic() - started, 1)}), flush=True)
