"""``asyncrl export``: from a run to a folder that others load."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from asyncrl.cli.common import Commands

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    text = "write trained weights as a folder that transformers, PEFT and SGLang load"
    export = commands.add("export", _export, text)
    export.add_argument("trained", type=Path, metavar="RUN", help="folder of a run, or of an adapter")
    export.add_argument("out", type=Path, metavar="OUT", help="new folder")
    export.add_argument("--version", type=int, metavar="N", help="of the run (default: the newest)")
    export.add_argument("--merged", action="store_true", help="a whole model, the adapter in its weights")


def _export(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.exporting import export
    from asyncrl.recipe.trained import find_trained

    trained = find_trained(arguments.trained, arguments.version, key="RUN")
    export(trained, arguments.out, merged=arguments.merged)
    kind = "adapter" if trained.is_adapter and not arguments.merged else "model"
    version = {} if trained.run is None else {"version": trained.version}
    # Where it lies is this machine's business: the folder itself does not say it.
    base = {"base_model": str(trained.base_model())} if kind == "adapter" else {}
    print(json.dumps({"out": str(arguments.out), "kind": kind, **base, **version}), flush=True)
