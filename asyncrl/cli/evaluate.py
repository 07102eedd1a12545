"""``asyncrl eval``: the held-out reward of a recipe's model."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import anyio

from asyncrl.cli.common import Commands, add_overrides, load, noting_begin, print_result
from asyncrl.concurrency.endings import keeping_first_error
from asyncrl.errors import ConfigError
from asyncrl.observe.console import reporting, until_signal

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command and its flags."""
    evaluate = commands.add(
        "eval", _evaluate, "measure the held-out reward of a recipe's model as it is before training"
    )
    evaluate.add_argument("recipe", type=Path, help="TOML file")
    add_overrides(evaluate)


def _evaluate(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.compose import compose

    started = time.monotonic()
    recipe = load(arguments)
    composed = compose(recipe)
    if (evaluator := composed.evaluator) is None:
        raise ConfigError(f"{recipe.path}: data.heldout is missing: it names the rows to evaluate")
    result: dict[str, object] = {}

    async def work() -> None:
        async with keeping_first_error(composed.engine.opened(composed.trainer.events)) as session:
            await session.publish(0)
            metrics = await evaluator.evaluate(session)
            result.update(heldout=metrics["reward_mean"], **metrics)

    events, style, secrets = composed.trainer.events, recipe.run.log, recipe.sampler.secrets()
    with (
        noting_begin(arguments, events),
        reporting(events, steps=0, style=style, debug=arguments.debug, secrets=secrets),
    ):
        stopped = anyio.run(until_signal, work, backend="asyncio")
    print_result(result, started, stopped)
