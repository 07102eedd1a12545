"""From a recipe to a run: imports the user's code, makes the model if need be, and wires the owners together.

Everything that can be wrong in a recipe is found here, before a model is loaded or a server started. Wiring is all
there is: no rule lives here. Left out: running it, which is the CLI's part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.options import Checkpointing
from asyncrl.errors import ConfigError
from asyncrl.learning.adapterfolder import read_adapter
from asyncrl.learning.base import Learner
from asyncrl.learning.modelfolder import find_model
from asyncrl.learning.torch_learner import TorchLearner
from asyncrl.plain import shown
from asyncrl.publishing.policy import Policy
from asyncrl.recipe.config import Recipe
from asyncrl.recipe.references import call, require_keywords, resolve
from asyncrl.recipe.rows import read_rows
from asyncrl.rollout.engine import RolloutEngine
from asyncrl.rollout.env import Env
from asyncrl.rollout.renderer import ChatRenderer, TextRenderer, load_renderer
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.sources import FileSource
from asyncrl.servers.machine import cache_directory
from asyncrl.servers.sglangcommand import Machine, SGLangOptions, plan_command, split_gpus
from asyncrl.servers.sglangserver import server_url
from asyncrl.training.evaluation import Evaluator
from asyncrl.training.trainer import AsyncTrainer
from asyncrl.types import Row

__all__ = ["ComposedPrompts", "ComposedRun", "compose", "compose_prompts", "parts", "renderer_of", "server_options"]

_LEAST_ADAPTERS = 8
_SPARE_ADAPTERS = 4
# Beside those that trajectories within the bound may use: the one that is published, and some that are being retired.


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedRun:
    """A run that is ready to start."""

    trainer: AsyncTrainer
    engine: RolloutEngine
    evaluator: Evaluator | None
    """None without held-out rows."""
    rows: Sequence[Row]
    steps: int


def compose(recipe: Recipe, *, directory: Path | None = None) -> ComposedRun:
    """Build the run that ``recipe`` describes; ``directory`` is its run directory, None to leave nothing behind.

    Imports the recipe's Python file and calls its row functions; calls ``model.source`` if its model is not cached
    yet, which imports torch. Raises ``ConfigError``.
    """
    with _named(recipe):
        recipe = _with_token_file(_with_adapter(recipe))
        recipe.sampler.secrets()  # for what the environment lacks, whoever asks for them later
        env, evaluator = _environment(recipe), _evaluator(recipe)
        rows = read_rows(recipe.data, "train", _folder(recipe))

        def wired(learner: Learner, model: Path | None) -> ComposedRun:
            adapters = None if directory is None else directory / "adapters"
            policy = Policy(learner, sampler=_sampler(recipe, model, directory), directory=adapters, **recipe.policy)
            engine = RolloutEngine(policy, env=env, **recipe.engine)
            saves = _checkpointing(recipe, directory)
            trainer = AsyncTrainer(engine=engine, evaluator=evaluator, checkpointing=saves, **recipe.trainer)
            return ComposedRun(trainer=trainer, engine=engine, evaluator=evaluator, rows=rows, steps=recipe.steps)

        if recipe.model.source is not None or recipe.model.download:
            # Making or downloading the model can take minutes: what is refused anyway is refused before that.
            lora = recipe.learner["lora"]
            unmade: Any = _UnmadeLearner(lora_rank=lora.r if lora else None)
            wired(unmade, None)
        model = _model(recipe)
        log = None if directory is None else directory / "ranks.log"
        return wired(TorchLearner(model, seed=recipe.engine["seed"], log=log, **recipe.learner), model)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedPrompts:
    """As much of a run as says what a model reads."""

    env: Callable[[], Env]
    rows: Sequence[Row]
    model: Path
    """Its folder."""


def compose_prompts(recipe: Recipe) -> ComposedPrompts:
    """What of ``recipe`` decides on prompts: as ``compose``, without learner and servers. Raises ``ConfigError``."""
    with _named(recipe):
        rows = read_rows(recipe.data, "train", _folder(recipe))
        return ComposedPrompts(env=_environment(recipe), rows=rows, model=_model(recipe, weights=False))


def parts(recipe: Recipe) -> Mapping[str, Callable[[], Any]]:
    """What ``compose`` puts together, by its keys: called, each is made or raises ``ConfigError`` by itself."""
    made: dict[str, Callable[[], Any]] = {
        "env": partial(_environment, recipe),
        "data.train": partial(read_rows, recipe.data, "train", _folder(recipe)),
        "model": partial(_model, recipe),
    }
    if recipe.data.heldout is not None:
        made["data.heldout"] = partial(read_rows, recipe.data, "heldout", _folder(recipe))
    return made


def renderer_of(recipe: Recipe, model: Path) -> ChatRenderer | TextRenderer:
    """How a run of ``recipe`` renders with the tokenizer in the folder ``model``. Raises ``ConfigError``."""
    how = {name: recipe.engine[name] for name in ("stop", "template_options", "announce_tools")}
    return load_renderer(model, recipe.engine["renderer"], **how)


@contextlib.contextmanager
def _named(recipe: Recipe) -> Iterator[None]:
    """Errors in the block name the recipe's file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{recipe.path}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnmadeLearner:
    """As much of a learner as the checks of a run look at."""

    lora_rank: int | None
    model_path: Path = Path("not-made-yet")


def _with_adapter(recipe: Recipe) -> Recipe:
    """The recipe with the folder of the adapter that it starts from, whose options are those of its own adapter."""
    adapter = recipe.learner["adapter"]
    if adapter is None:
        return recipe
    folder = _folder(recipe) / Path(adapter).expanduser()
    lora = read_adapter(folder, recipe.learner["lora"])
    return dataclasses.replace(recipe, learner={**recipe.learner, "adapter": folder, "lora": lora})


def _with_token_file(recipe: Recipe) -> Recipe:
    """The recipe with the whole path of the file that ranks elsewhere share a secret in."""
    token = recipe.learner["token_file"]
    if token is None:
        return recipe
    return dataclasses.replace(
        recipe, learner={**recipe.learner, "token_file": _folder(recipe) / Path(token).expanduser()}
    )


def _checkpointing(recipe: Recipe, directory: Path | None) -> Checkpointing | None:
    if directory is None or recipe.checkpointing is None:
        return None
    return Checkpointing(directory, **recipe.checkpointing)


def _sampler(recipe: Recipe, model: Path | None, directory: Path | None) -> SGLang | None:
    """The client of the servers that the recipe names or has started; None is the embedded server."""
    section = recipe.sampler
    if section.named:
        # A relative path is seen from the recipe's folder, as that of a model is.
        source = section.urls or FileSource(_folder(recipe) / str(section.urls_file))
        return SGLang(source, api_key=section.api_key(), admin_key=section.admin_key(), **recipe.client)
    if not section.launches:
        return None
    options = server_options(recipe, model or recipe.path.parent)
    # For what this machine lacks, which is said before a model is made.
    machine = Machine.found()
    plan_command(options, machine)
    split_gpus(options, machine, section.servers)
    if model is None:
        # Never opened: as many as there will be, for what the checks make of that.
        return SGLang([server_url(dataclasses.replace(options, port=1 + index)) for index in range(section.servers)])
    return SGLang.launch(options, servers=section.servers, log_directory=directory)


def server_options(recipe: Recipe, model: Path) -> SGLangOptions:
    """How the SGLang servers of a run that starts its own are started. Raises ``ConfigError``."""
    try:
        return SGLangOptions(
            model=model,
            # The publisher compares log-probabilities of both sides, so both have the same dtype.
            **{name: recipe.learner[name] for name in ("lora", "dtype")},
            max_loras_per_batch=max(_LEAST_ADAPTERS, recipe.trainer["max_staleness"] + _SPARE_ADAPTERS),
            api_key=recipe.sampler.api_key(),
            seed=recipe.engine["seed"],
            **recipe.launched,
        )
    except ConfigError as error:
        raise ConfigError(f"sampler.{error}") from error


def _folder(recipe: Recipe) -> Path:
    """Where references and paths of the recipe are seen from."""
    return recipe.path.resolve().parent


def _environment(recipe: Recipe) -> Callable[[], Env]:
    reference, options = recipe.env.factory, recipe.env.options
    factory = resolve("env.factory", reference, _folder(recipe))
    if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, Env)):
        raise ConfigError.for_value("env.factory", reference, "an Env class or a function that returns an Env")
    require_keywords("env", reference, factory, options)
    return partial(factory, **options)


def _evaluator(recipe: Recipe) -> Evaluator | None:
    if recipe.data.heldout is None:
        return None
    return Evaluator(rows=read_rows(recipe.data, "heldout", _folder(recipe)), **recipe.evaluation)


def _model(recipe: Recipe, *, weights: bool = True) -> Path:
    """The model's folder, downloaded or made first if the recipe says so; ``weights`` as in ``find_model``."""
    model, base = recipe.model, _folder(recipe)
    if model.source is None:
        return find_model(str(model.path), download=model.download, weights=weights, key="model.path", base=base)
    build = resolve("model.source", model.source, base)
    options = model.source_options or {}
    folder = cache_directory() / "models" / _cache_name(model.source, _source_file(build), options)
    if not folder.is_dir():
        _write_model(build, folder, model.source, options)
    return folder


def _source_file(function: object) -> str | None:
    try:
        return inspect.getsourcefile(function)  # type: ignore[arg-type]
    except TypeError:
        return None  # what is written in C, or no function


def _cache_name(reference: str, source: str | None, options: Mapping[str, object]) -> str:
    """Changes with the file that makes the model, so that an edited recipe never trains the model of the old one."""
    text = Path(source).read_bytes() if source else reference.encode()
    if options:
        text += repr(sorted(options.items())).encode()
    return f"{reference.partition(':')[2]}-{hashlib.sha256(text).hexdigest()[:16]}"


def _write_model(build: object, folder: Path, reference: str, options: Mapping[str, object]) -> None:
    """Whole or not at all. Another run may make the same model at the same time: the first stays, it is in use."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{temporary.parent}, where models are kept, cannot be written: {error.strerror}") from error
    try:
        expects = "a function that takes a folder, and the keywords of model.source_options, and writes a model into it"
        call("model.source", reference, build, temporary, expects=expects, keywords=options)
        find_model(temporary, key=f"what model.source = {shown(reference)} made")
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
