"""The ``asyncrl`` command: train | demo | eval | serve | install-sglang | simulate | render.

It reads the arguments, says at once that something happens, and maps what happens to an exit code. stdout carries one
JSON line, the result; everything for people goes to stderr. Composition is in ``compose``, the work in its owners.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from asyncrl.concurrency.endings import first_error, keeping_first_error
from asyncrl.concurrency.signals import cancelled_by
from asyncrl.errors import ConfigError
from asyncrl.observe.pipes import lasting_streams
from asyncrl.plain import shown
from asyncrl.servers.serving import add_server_flags, serve
from asyncrl.simulation.options import add_simulation_flags, read_options

if TYPE_CHECKING:
    from asyncrl.events import Event, Events
    from asyncrl.recipe.compose import ComposedRun
    from asyncrl.recipe.config import Recipe

__all__ = ["main"]

_SHOW_CURSOR = "\x1b[?25h"
# The live line hides it.
_RUN_FILES = ("run.json", "metrics.jsonl", "events.jsonl", "state", "weights", "journal")
_EPILOG = """\
stdout carries one JSON line, the result; progress and errors go to stderr.

exit codes:
  0    done, or stopped by the first SIGINT or SIGTERM (the result then has "stopped": true)
  1    the run failed; the first error is on stderr, --debug adds its traceback
  2    the command line or the recipe is wrong; nothing was sampled or trained
  130  exited at once: the second SIGINT (143: SIGTERM), or the first before the run began
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    with lasting_streams():
        # Once the run has begun an error is the run's, also if its class is that of a wrong option.
        arguments = _parser().parse_args(argv, argparse.Namespace(published=[]))
        try:
            arguments.command(arguments)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception as error:  # noqa: BLE001  the top: every error becomes a message and an exit code
            return _report(first_error(error), debug=arguments.debug, begun=bool(arguments.published))
        return 0


def _report(error: BaseException, *, debug: bool, begun: bool = True) -> int:
    if debug:
        traceback.print_exception(error)
    refused = isinstance(error, ConfigError) and not begun
    text = str(error) if refused else f"failed: {type(error).__name__}: {error}"
    _say("\n".join([text, *getattr(error, "__notes__", ())]))
    return 2 if refused else 1


def _train(arguments: argparse.Namespace) -> None:
    from asyncrl.checkpoint.directory import write_configuration
    from asyncrl.events import Notice
    from asyncrl.observe.sinks import read_results
    from asyncrl.observe.summary import RunSummary

    started = time.monotonic()
    recipe = _load(arguments)
    directory = _run_directory(recipe, arguments.run_dir, arguments.resume)
    composed = _compose(recipe, directory)
    summary = RunSummary()
    earlier: list[Event] = []
    if arguments.resume is None:
        _make_directory(directory)
        write_configuration(directory, recipe.tables)
    else:
        earlier = list(read_results(directory))

    async def work() -> None:
        await _run_steps(composed, directory)

    events = composed.trainer.events
    events.subscribe(summary.observe)
    with _reporting(arguments, recipe, events, steps=composed.steps):
        for event in earlier:
            if isinstance(event, Notice):
                events.emit(event)
            else:
                summary.observe(event)
        stopped = anyio.run(_until_signal, work, backend="asyncio")
    _print_result({**summary.summary(), "run_dir": str(directory)}, started, stopped)


async def _run_steps(composed: ComposedRun, directory: Path) -> None:
    from asyncrl.observe.sinks import write_events

    steps = composed.trainer.run(composed.rows, steps=composed.steps)
    async with write_events(directory, composed.trainer.events), contextlib.aclosing(steps):
        async for _ in steps:
            pass


def _evaluate(arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    recipe = _load(arguments)
    composed = _compose(recipe, None)
    if (evaluator := composed.evaluator) is None:
        raise ConfigError(f"{recipe.path}: data.heldout is missing: it names the rows to evaluate")
    result: dict[str, object] = {}

    async def work() -> None:
        async with keeping_first_error(composed.engine.opened(composed.trainer.events)) as session:
            await session.publish(0)
            metrics = await evaluator.evaluate(session)
            result.update(heldout=metrics["reward_mean"], **metrics)

    with _reporting(arguments, recipe, composed.trainer.events, steps=0):
        stopped = anyio.run(_until_signal, work, backend="asyncio")
    _print_result(result, started, stopped)


def _serve(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "debug", "published")}
    serve(given.pop("backend"), given, say=_say, until_signal=_until_signal)


def _install_sglang(arguments: argparse.Namespace) -> None:
    from asyncrl.servers.install import install_sglang

    installed = install_sglang(arguments.directory, say=_say)
    result = {"python": str(installed.python), "made": installed.made, "seconds": round(installed.seconds, 1)}
    print(json.dumps(result), flush=True)


def _simulate(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.config import load_recipe
    from asyncrl.simulation.command import run_simulation
    from asyncrl.simulation.grid import RunOptions

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    lora = recipe.learner["lora"]
    run = RunOptions(
        path=recipe.path,
        engine=recipe.engine,
        trainer=recipe.trainer,
        steps=recipe.steps,
        lora_rank=None if lora is None else lora.r,
    )
    run_simulation(run, read_options(vars(arguments), run.name), _say)


def _render(arguments: argparse.Namespace) -> None:
    from asyncrl.recipe.rendering import render_row

    anyio.run(partial(render_row, _load(arguments), arguments.row, say=_say), backend="asyncio")


def _load(arguments: argparse.Namespace) -> Recipe:
    from asyncrl.recipe.config import load_recipe

    path = arguments.recipe or _demo_recipe()
    _say(f"loading {path} (importing torch and, the first time, making the model can take half a minute)")
    return load_recipe(path, arguments.overrides)


def _compose(recipe: Recipe, directory: Path | None) -> ComposedRun:
    from asyncrl.recipe.compose import compose

    return compose(recipe, directory=directory)


def _demo_recipe() -> Path:
    """Beside the package in a checkout, inside it when installed."""
    package = Path(__file__).parent
    found = [root / "envs/guess_number/recipe.toml" for root in (package.parent, package)]
    for recipe in found:
        if recipe.is_file():
            return recipe
    raise ConfigError(f"the demo's recipe is in neither {found[0]} nor {found[1]}")


def _run_directory(recipe: Recipe, chosen: Path | None, resume: Path | None) -> Path:
    if resume is not None:
        if recipe.checkpointing is None:
            raise ConfigError.for_value("checkpoint.enabled", False, "true to resume a run")
        if not os.path.lexists(resume / _RUN_FILES[0]):
            raise ConfigError.for_value("--resume", str(resume), "the folder of a run (there is no run.json in it)")
        return resume
    if chosen is None:
        name = f"{recipe.path.resolve().parent.name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        return Path(recipe.run.directory) / name
    if "\0" in str(chosen):
        raise ConfigError.for_value("--run-dir", str(chosen), "a folder that can be made")
    found = [name for name in _RUN_FILES if os.path.lexists(chosen / name)]
    if found:
        hint = f"go on with that one by --resume {chosen}, or " if found[0] == _RUN_FILES[0] else ""
        raise ConfigError(
            f"--run-dir is {shown(str(chosen))}, which has the files of another run ({', '.join(found)}): {hint}use "
            "another folder"
        )
    return chosen


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError.for_value("--run-dir", str(directory), f"a folder that can be made: {error}") from error


async def _until_signal(work: Callable[[], Awaitable[None]]) -> bool:
    """Await ``work()``; the first SIGINT or SIGTERM cancels it and makes this True, the second exits the process."""
    signals = (signal.SIGINT, signal.SIGTERM)
    async with cancelled_by(signals, on_first=_say_that_it_stops, on_second=_show_cursor) as scope:
        await work()
    return scope.cancelled_caught


def _say_that_it_stops(number: signal.Signals) -> None:
    _say(f"{number.name}: stopping, which takes at most a minute; a second signal exits at once")


def _show_cursor() -> None:
    if sys.stderr.isatty():
        print(_SHOW_CURSOR, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _reporting(arguments: argparse.Namespace, recipe: Recipe, events: Events, *, steps: int) -> Iterator[None]:
    """Log lines, and on a terminal a live line, on stderr while the block runs; and whether the run has begun."""
    from asyncrl.events import VersionPublished
    from asyncrl.observe.logs import LogLines, open_log
    from asyncrl.observe.progress import show_progress

    style = recipe.run.log
    # Servers and learner are up when the first version is live. Nothing was sampled before.
    events.subscribe(arguments.published.append, kinds=(VersionPublished,))
    with contextlib.ExitStack() as stack:
        stream = sys.stderr
        if style == "console":
            stream = stack.enter_context(show_progress(events, steps=steps, stream=stream))
        log = open_log(stream, style=style, debug=arguments.debug, secrets=recipe.sampler.secrets())
        stack.callback(events.subscribe(LogLines(log).observe))
        yield


def _print_result(result: dict[str, Any], started: float, stopped: bool) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}
    rounded["seconds"] = round(time.monotonic() - started, 1)
    if stopped:
        rounded["stopped"] = True
    print(json.dumps(rounded), flush=True)


def _say(text: str) -> None:
    print(f"asyncrl: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous reinforcement learning of language models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, command: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        formatter = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, help=text, description=text, epilog=_EPILOG, formatter_class=formatter)
        added.set_defaults(command=command)
        added.add_argument("--debug", action="store_true", help="more log lines, and tracebacks of errors")
        return added

    train = add("train", _train, "train a recipe")
    train.add_argument("recipe", type=Path, help="TOML file; paths in it are relative to it")
    demo = add("demo", _train, "train the guess-a-number recipe, on any machine in about two minutes")
    demo.set_defaults(recipe=None)
    evaluate = add("eval", _evaluate, "measure the held-out reward of a recipe's model as it is before training")
    evaluate.add_argument("recipe", type=Path, help="TOML file")
    simulate = add("simulate", _simulate, "predict steps per hour and token age of other schedules in seconds")
    simulate.add_argument("recipe", type=Path, help="TOML file; its environment and model are not needed")
    render = add("render", _render, "print what the model will read of a row, each token with what it is")
    render.add_argument("recipe", type=Path, help="TOML file")
    render.add_argument("--row", type=int, default=0, metavar="N", help="of data.train (0)")
    for command in (train, demo, evaluate, simulate, render):
        command.add_argument(
            "--set",
            dest="overrides",
            metavar="section.key=value",
            action="append",
            default=[],
            help="replace a value of the recipe (TOML, or a bare string); can be repeated",
        )
    for command in (train, demo):
        folder = command.add_mutually_exclusive_group()
        folder.add_argument(
            "--run-dir", type=Path, metavar="DIR", help="folder for the run's files (default: a new one)"
        )
        folder.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in that folder")
    add_simulation_flags(simulate)
    add_server_flags(add("serve", _serve, "serve a model folder: the embedded server, or a real SGLang"))
    install = add("install-sglang", _install_sglang, "make the environment of SGLang's CPU server (some gigabytes)")
    install.add_argument("--directory", type=Path, metavar="DIR", help="where (default: in the cache folder)")
    return parser
