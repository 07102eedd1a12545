"""``asyncrl serve``: a server in the foreground."""

from __future__ import annotations

import argparse

from asyncrl.cli.common import EPILOG, Commands
from asyncrl.observe.console import say, until_signal

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    serve = commands.add("serve", _serve, "serve a model: the embedded server, or a real SGLang")
    serve.late_epilog = _epilog
    serve.late_flags = _flags


def _flags(parser: argparse.ArgumentParser) -> None:
    from asyncrl.servers.serving import add_server_flags

    add_server_flags(parser)


def _epilog() -> str:
    """The routes of the embedded server, as they are: whoever writes a client looks here."""
    from asyncrl.servers.routes import METHODS

    lines = [f"  {method:<5}{route}" for route, method in sorted(METHODS.items(), key=lambda item: item[::-1])]
    return "\n".join(["routes of the embedded server, which answers them as SGLang does:", *lines, "", EPILOG])


def _serve(arguments: argparse.Namespace) -> None:
    from asyncrl.servers.serving import serve

    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "debug", "published")}
    serve(given.pop("backend"), given, say=say, until_signal=until_signal)
