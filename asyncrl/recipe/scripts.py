"""Scripts in the place of recipes: a Python file that builds a trainer and hands it to ``rl.run``.

The file runs as if by ``python``; only what ``rl.run`` does there is decided here, by whoever runs the script.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.plain import shown
from asyncrl.recipe.compose import ComposedRun
from asyncrl.recipe.references import refuse
from asyncrl.training.attended import RunCall, RunEnd
from asyncrl.training.running import RunHost, host

__all__ = ["compose_script", "is_script", "run_script"]


def is_script(path: Path | None) -> bool:
    """True if a script and not a recipe is named."""
    return path is not None and path.suffix == ".py"


def run_script(path: Path, make_run: RunHost) -> None:
    """Run the script at ``path``; ``make_run`` makes the run that it asks for, which may be one.

    Raises ``ConfigError`` if the script raises before it asks for a run, or asks for none or for two; whatever the run
    raises is raised as it is.
    """
    asked = False

    def once(call: RunCall, directory: Path | None) -> RunEnd:
        nonlocal asked
        if asked:
            raise ConfigError(f"{path} calls rl.run more than once: run it by python, which makes them one by one")
        asked = True
        return make_run(call, directory)

    token = host.set(once)
    try:
        with _as_main(path):
            runpy.run_path(str(path), run_name="__main__")
    except ConfigError:
        raise
    except SystemExit as end:
        if end.code not in (None, 0):
            if asked:
                raise
            raise refuse("script", str(path), "ended", end) from end
    except Exception as error:
        if asked:
            raise
        raise refuse("script", str(path), "raised", error) from error
    finally:
        host.reset(token)
    if not asked:
        raise ConfigError(
            f"{path} never called rl.run: end it with rl.run(trainer, rows, steps=..), or run it by python if it "
            "takes its steps from trainer.run itself"
        )


def compose_script(path: Path) -> ComposedRun:
    """What the script at ``path`` hands to ``rl.run``; the run is not made. Raises ``ConfigError``."""
    found: list[RunCall] = []

    def note(call: RunCall, directory: Path | None) -> RunEnd:
        found.append(call)
        return RunEnd(steps=(), stopped=True, summary={})  # ends the script there

    run_script(path, note)
    [call] = found
    return ComposedRun(
        trainer=call.trainer,
        engine=call.trainer.engine,
        evaluator=call.trainer.evaluator,
        rows=call.rows,
        steps=call.steps,
    )


@contextmanager
def _as_main(path: Path) -> Iterator[None]:
    """The interpreter's view of a program that was started as ``python path``."""
    if not path.is_file():
        raise ConfigError(f"there is no script {shown(str(path))}")
    arguments, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(path)], str(path.resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[0] = arguments, first
