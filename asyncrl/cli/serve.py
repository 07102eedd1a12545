"""``asyncrl serve`` and ``asyncrl install-sglang``: servers in the foreground, and the environment of SGLang's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from asyncrl.cli.common import Commands
from asyncrl.observe.console import say, until_signal
from asyncrl.servers.serving import add_server_flags, serve

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the commands and their flags."""
    add_server_flags(commands.add("serve", _serve, "serve a model folder: the embedded server, or a real SGLang"))
    text = "make the environment of SGLang's CPU server (some gigabytes)"
    install = commands.add("install-sglang", _install_sglang, text)
    install.add_argument("--directory", type=Path, metavar="DIR", help="where (default: in the cache folder)")


def _serve(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "debug", "published")}
    serve(given.pop("backend"), given, say=say, until_signal=until_signal)


def _install_sglang(arguments: argparse.Namespace) -> None:
    from asyncrl.servers.install import install_sglang

    installed = install_sglang(arguments.directory, say=say)
    result = {"python": str(installed.python), "made": installed.made, "seconds": round(installed.seconds, 1)}
    print(json.dumps(result), flush=True)
