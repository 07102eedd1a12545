"""``asyncrl serve``: a server in the foreground."""

from __future__ import annotations

import argparse

from asyncrl.cli.common import Commands
from asyncrl.observe.console import say, until_signal
from asyncrl.servers.serving import add_server_flags, serve

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    add_server_flags(commands.add("serve", _serve, "serve a model folder: the embedded server, or a real SGLang"))


def _serve(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "debug", "published")}
    serve(given.pop("backend"), given, say=say, until_signal=until_signal)
