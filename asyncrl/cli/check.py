"""``asyncrl check``: what is wrong with a recipe and its environment, before anything is trained."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from asyncrl.cli.common import Commands, add_overrides
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.recipe.findings import Finding

__all__ = ["add"]

_STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not checked": "dim"}
_WIDTH = max(map(len, _STYLES))
_EPILOG = """\
Each part of a recipe gets a line: ok, wrong, a warning, or not checked. Then the first prompt is shown as the model
will read it, and the environment plays scripted conversations: each tool is called once with made-up arguments, and
reward, snapshot, restore and close are called. Nothing is sampled or trained, but what the environment calls is really
called.

exit codes:
  0    nothing is wrong
  2    something is
"""


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    text = "look for what is wrong with a recipe and its environment, in seconds"
    check = commands.add("check", _check, text, epilog=_EPILOG)
    check.add_argument("recipe", type=Path, help="TOML file, or a script that calls rl.run, which is run up to there")
    seconds = "for each call of the environment (30)"
    check.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help=seconds)
    add_overrides(check)


def _check(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.checking import check_composed, check_recipe
    from asyncrl.recipe.config import load_recipe
    from asyncrl.recipe.findings import Findings
    from asyncrl.recipe.rendering import plain_console, print_prompt
    from asyncrl.recipe.scripts import compose_script, is_script

    console = plain_console()
    if not arguments.timeout > 0:
        raise ConfigError.for_value("--timeout", arguments.timeout, "more than 0 seconds")

    def show(finding: Finding) -> None:
        from rich.text import Text

        line = Text(f"{finding.verdict:<{_WIDTH}}  ", style=_STYLES[finding.verdict])
        console.print(line.append(f"{finding.part}: {finding.text}", style="not dim"))
        for traced in finding.trace:
            console.print(Text(f"  {traced}", style="dim"))
        if finding.todo:
            console.print(Text(f"{'':<{_WIDTH}}  -> {finding.todo}"))

    path: Path = arguments.recipe
    findings = Findings(show)
    how = {"show_prompt": partial(print_prompt, console), "timeout_s": arguments.timeout}
    if is_script(path):
        look = partial(check_composed, compose_script(path), findings, **how)
    else:
        look = partial(check_recipe, load_recipe(path, arguments.overrides), findings, **how)
    findings.ok("recipe", str(path))
    anyio.run(look, backend="asyncio")
    if findings.wrong:
        raise ConfigError(f"{path}: {findings.wrong} wrong, see above; nothing was trained")
