"""``asyncrl eval``: the held-out metrics of a recipe's model, or of what was trained."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from asyncrl.cli.common import Commands, add_overrides, noting_begin, print_result
from asyncrl.concurrency.endings import keeping_first_error
from asyncrl.errors import ConfigError
from asyncrl.observe.console import Reporting, reporting, say, until_signal

if TYPE_CHECKING:
    from asyncrl.recipe.compose import ComposedRun
    from asyncrl.recipe.trained import Trained

__all__ = ["add"]

_NOT_HELD_OUT = "no rows are held out (data.heldout): those that are trained on are measured, which says less"
_RECIPES = (".toml", ".py")


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    text = "measure held-out rewards: of a run's newest version, of other weights, or of a recipe's model untrained"
    evaluate = commands.add("eval", _evaluate, text)
    evaluate.add_argument(
        "what", type=Path, metavar="RUN|WEIGHTS|RECIPE", help="folder of a run, of an adapter or model; or a recipe"
    )
    evaluate.add_argument(
        "recipe", type=Path, nargs="?", metavar="RECIPE", help="environment and rows (default: the run's own)"
    )
    evaluate.add_argument("--version", type=int, metavar="N", help="of the run (default: the newest)")
    add_overrides(evaluate)


def _evaluate(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.scripts import is_script
    from asyncrl.training.evaluation import Evaluator

    started = time.monotonic()
    trained, recipe, overrides = _wanted(arguments)
    composed, style, secrets = _composed(recipe, overrides, trained)
    evaluator = composed.evaluator or Evaluator(rows=composed.rows)
    result: dict[str, object] = {}

    async def work() -> None:
        async with keeping_first_error(composed.engine.opened(composed.trainer.events)) as session:
            version = 0 if trained is None else trained.version
            if trained is not None and is_script(recipe):  # a recipe starts from them
                await session.policy.learner.load_exported(trained.folder)
            await session.publish(version)
            metrics = await evaluator.evaluate(session)
            result.update(heldout=metrics["reward_mean"], version=version, **metrics)

    events = composed.trainer.events
    with (
        noting_begin(arguments, events),
        reporting(events, steps=0, style=style, debug=arguments.debug, secrets=secrets),
    ):
        stopped = anyio.run(until_signal, work, backend="asyncio")
    print_result(result, started, stopped)


def _wanted(arguments: argparse.Namespace) -> tuple[Trained | None, Path, Sequence[str]]:
    """The weights (None: the recipe's own), the recipe, and what is changed in it."""
    from asyncrl.recipe.trained import find_trained, recipe_of

    what: Path = arguments.what
    if what.suffix in _RECIPES:
        for name, value in (("RECIPE", arguments.recipe), ("--version", arguments.version)):
            if value is not None:
                raise ConfigError.for_value(name, str(value), f"left out: {what} is a recipe, whose model is measured")
        return None, what, arguments.overrides
    trained = find_trained(what, arguments.version, key="RUN|WEIGHTS|RECIPE")
    if arguments.recipe is not None:
        return trained, arguments.recipe, arguments.overrides
    if trained.run is None:
        raise ConfigError(
            f"{what} is not the folder of a run: name the recipe after it, which has environment and rows"
        )
    path, overrides = recipe_of(trained.run)
    return trained, path, [*overrides, *arguments.overrides]


def _composed(
    recipe: Path, overrides: Sequence[str], trained: Trained | None
) -> tuple[ComposedRun, Reporting, Sequence[str]]:
    """The run of the recipe or script, how it reports, and what must not be in its logs."""
    from asyncrl.recipe.compose import compose
    from asyncrl.recipe.config import load_recipe
    from asyncrl.recipe.scripts import compose_script, is_script

    say(f"loading {recipe} (importing torch and, the first time, making the model can take half a minute)")
    if is_script(recipe):
        if overrides:
            raise ConfigError.for_value("--set", overrides[0], "left out: a script has its own options")
        composed = compose_script(recipe)
        if composed.evaluator is None:
            say(_NOT_HELD_OUT)
        return composed, "console", ()
    loaded = load_recipe(recipe, [*overrides, *([] if trained is None else trained.overrides())])
    if loaded.data.heldout is None:
        say(_NOT_HELD_OUT)
        loaded = replace(loaded, data=replace(loaded.data, heldout=loaded.data.train))
    return compose(loaded), loaded.run.log, loaded.sampler.secrets()
