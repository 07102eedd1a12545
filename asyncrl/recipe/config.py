"""Recipes: a run as a TOML file, read into what the constructors of the run are called with.

``load_recipe`` checks every key and the type of every value without importing the user's code, the model or torch;
``compose`` builds the run from the result. The keys of a section are the options of the class that it is for, as its
constructor has them, and the few that only a recipe has, which are below. Values out of range are refused by the
constructors: some of them here, the others by ``compose``.

Paths and references (``env.py:GuessNumber``) are relative to the recipe; the run directory to where the command runs.
Nothing here reads the environment of the process: ``servers/machine.py`` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from asyncrl.checkpoint.options import Checkpointing
from asyncrl.errors import ConfigError, require_count
from asyncrl.learning.advantages import Advantage, Batchwise, GroupCentered, LeaveOneOut, MaxRL, ReinforcePlusPlus
from asyncrl.learning.losses import loss_from
from asyncrl.learning.options import Adam, constant, cosine, linear
from asyncrl.learning.torch_learner import TorchLearner
from asyncrl.observe.kept import KeptRollouts
from asyncrl.plain import shown
from asyncrl.publishing.policy import Policy
from asyncrl.recipe.tables import Key, Table, keys_of, override, parse_tables, read_keywords, read_table, require_known
from asyncrl.rollout.budget import Budget
from asyncrl.rollout.engine import RolloutEngine
from asyncrl.rollout.failures import Failures
from asyncrl.sampling.sglang import SGLang
from asyncrl.scheduling.rules import GroupCompletion, Schedule, Truncation
from asyncrl.servers.machine import read_secret
from asyncrl.servers.sglangcommand import SGLangOptions
from asyncrl.training.evaluation import Evaluator
from asyncrl.training.trainer import AsyncTrainer

__all__ = ["SECTIONS", "DataFiles", "Environment", "ModelFolder", "Recipe", "RunFolder", "Servers", "load_recipe"]

_Open = TypeVar("_Open", "Environment", "DataFiles")
Keywords: TypeAlias = Mapping[str, Any]
"""Keyword arguments of a constructor, all that a recipe can say."""

_ADVANTAGES: Mapping[str, type[Advantage]] = {
    "group_centered": GroupCentered,
    "batchwise": Batchwise,
    "leave_one_out": LeaveOneOut,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "max_rl": MaxRL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Of ``[model]``: what is trained, ``path`` or ``source``; the other keys are those of ``TorchLearner``."""

    path: str | None = None
    """A model folder with its tokenizer, or a name of the Hugging Face hub such as ``Qwen/Qwen3-0.6B``, also with a
    revision: ``name@revision``. Names are looked up in the local cache."""
    download: bool = False
    """Fetch the model of that name from the hub if it is not in the cache."""
    source: str | None = None
    """Instead of ``path``: reference to ``function(directory: Path) -> None`` that writes a model folder; it is called
    once, then cached."""
    source_options: Table | None = None
    """Keywords of that function."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.source is None):
            raise ConfigError("[model] must have exactly one of path (a model) and source (a function that makes one)")
        if self.path is None and self.download:
            raise ConfigError.for_value("model.download", True, "left out beside model.source")
        if self.source is None and self.source_options is not None:
            raise ConfigError.for_value("model.source_options", self.source_options, "left out without model.source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """``[env]``: where the reward comes from. Every key but ``factory`` is a keyword of the environment, and so also
    what its reward is told: it keeps it as an attribute."""

    factory: str
    """Reference to an ``Env`` class or a function that returns one."""
    options: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFiles:
    """``[data]``: where the rows come from, a file or a function. Every other key is a keyword of the functions."""

    train: str
    """A file (``rows.jsonl``; JSON, CSV, TSV, Parquet or a folder of ``datasets``), or a reference to a function that
    returns a list of rows."""
    heldout: str | None = None
    """The same: evaluated before the first and after the last step, and as often as ``[evaluation]`` says."""
    options: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """``[sampler]``: the embedded server in a process of its own; SGLang servers by URL, or of our own without URLs.

    The other keys are those of ``SGLang`` and of ``SGLangOptions``, for servers that the run starts.
    """

    backend: Literal["embedded", "sglang"] = "embedded"
    """What samples: a small server of asyncrl in a process of its own, or SGLang."""
    urls: tuple[str, ...] = ()
    """Of SGLang servers that run, or one ``dns+http://name:port`` for all addresses of a name; without any, servers are
    started on this machine for the run."""
    urls_file: str | None = None
    """Instead of ``urls``: a file with one URL a line, which is read again while the run goes on."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' key; the key itself has no place in a recipe."""
    admin_key_env: str | None = None
    """Name of the one with the key of control routes, if the servers have one beside the other."""
    servers: int = 1
    """SGLang servers that the run starts."""

    def __post_init__(self) -> None:
        require_count("sampler.servers", self.servers, least=1)
        if self.urls and self.backend == "embedded":
            raise ConfigError.for_value("sampler.urls", list(self.urls), "left out for backend 'embedded'")
        if self.urls_file is not None and (self.urls or self.backend == "embedded"):
            allowed = "left out for backend 'embedded' and beside sampler.urls"
            raise ConfigError.for_value("sampler.urls_file", self.urls_file, allowed)

    @property
    def named(self) -> bool:
        """True if the recipe says where the servers are."""
        return bool(self.urls) or self.urls_file is not None

    @property
    def launches(self) -> bool:
        """True if the run starts real SGLang servers."""
        return self.backend == "sglang" and not self.named

    def api_key(self) -> str | None:
        """The servers' key, read from the environment now; None if the recipe names no variable."""
        return None if self.api_key_env is None else read_secret("sampler.api_key_env", self.api_key_env)

    def admin_key(self) -> str | None:
        """The key of the servers' control routes, in the same way."""
        return None if self.admin_key_env is None else read_secret("sampler.admin_key_env", self.admin_key_env)

    def secrets(self) -> list[str]:
        """Both keys, as far as there are any: what must not be in logs."""
        return [key for key in (self.api_key(), self.admin_key()) if key is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Of ``[run]``: where the files of a run are; the other keys are those of ``KeptRollouts``."""

    directory: str = "runs"
    """Each run gets a new folder in it."""
    log: Literal["console", "json"] = "console"
    """Lines on stderr: for people, or one JSON object each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Keys of several sections that only a recipe has: in Python one passes another object, or none."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate: after the ``warmup`` it stays, or falls to ``floor`` in a line or half a cosine."""
    kind: Literal["group_centered", "batchwise", "leave_one_out", "reinforce_plus_plus", "max_rl"] = "group_centered"
    """What a reward is compared with: the mean of its group (GRPO), of the whole batch, or of the group's other members
    (RLOO); REINFORCE++ normalises over the batch, MaxRL divides by the group's mean."""
    enabled: bool = True
    """Keep the run's state on disk, so that it can be stopped, killed and resumed."""


_GIVEN = ("model", "lora", "dtype", "seed", "host", "port", "api_key", "admin_key", "max_loras_per_batch")
# Of SGLangOptions, by other sections and by ``compose``.
_RULES: Mapping[str, type] = {
    "budget": Budget,
    "schedule": Schedule,
    "failures": Failures,
    "completion": GroupCompletion,
    "truncation": Truncation,
}
_CHOICES = keys_of(Choices)
_POLICY = keys_of(Policy, without=("directory", "name", "sampler_threads"))
SECTIONS: Mapping[str, Sequence[Mapping[str, Key]]] = {
    "model": (keys_of(ModelFolder), keys_of(TorchLearner, without=("model", "seed", "log"))),
    "env": (keys_of(Environment, without=("options",)),),
    "data": (keys_of(DataFiles, without=("options",)),),
    "trainer": (
        keys_of(AsyncTrainer.run, without=("self", "rows")),
        keys_of(AsyncTrainer, without=("optimizer", "completion", "truncation", "evaluator", "checkpointing")),
    ),
    "optimizer": (keys_of(Adam, without=("schedule",)), keys_of(cosine), {"schedule": _CHOICES["schedule"]}),
    "sampler": (
        keys_of(Servers),
        keys_of(SGLang, without=("urls", "api_key", "admin_key", "vocab_size", "seed")),
        keys_of(SGLangOptions, without=_GIVEN),
    ),
    "publication": ({{"publication": "method"}.get(name, name): key for name, key in _POLICY.items()},),
    "rollout": (keys_of(RolloutEngine, without=("budget", "schedule", "failures")),),
    **{name: (keys_of(kind),) for name, kind in _RULES.items()},
    "loss": (),
    "advantage": ({"kind": _CHOICES["kind"]}, *map(keys_of, _ADVANTAGES.values())),
    "evaluation": (keys_of(Evaluator, without=("rows",)),),
    "checkpoint": ({"enabled": _CHOICES["enabled"]}, keys_of(Checkpointing, without=("run_dir", "on_signal"))),
    "run": (keys_of(RunFolder), keys_of(KeptRollouts)),
}
"""The keys of each section, apart by what they are for. Others of ``[env]``, ``[data]`` and ``[loss]`` are keywords of
the user's functions and of the loss; an option that another section gives, or that is not for a file, is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole run as what its parts are called with; ``tables`` is what the file and the overrides said."""

    path: Path
    tables: Table
    model: ModelFolder
    learner: Keywords
    """Of ``TorchLearner``, without the model and the seed."""
    env: Environment
    data: DataFiles
    sampler: Servers
    client: Keywords
    """Of ``SGLang``, for servers that are named."""
    launched: Keywords
    """Of ``SGLangOptions``, for servers that the run starts."""
    policy: Keywords
    engine: Keywords
    trainer: Keywords
    steps: int
    evaluation: Keywords
    checkpointing: Keywords | None
    run: RunFolder
    rollouts: KeptRollouts


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at ``path`` with ``section.key=value`` overrides applied.

    Raises ``ConfigError`` with the file, the key, the value found and what is allowed.
    """
    try:
        tables = parse_tables(path.read_text(encoding="utf-8"))
        for assignment in overrides:
            tables = override(tables, assignment)
        return _read_recipe(path, tables)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not TOML, which is UTF-8: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValueError as error:  # a path with the character 0
        raise ConfigError(f"{shown(str(path))}: cannot be read: {error}") from error


def _read_recipe(path: Path, tables: Table) -> Recipe:
    require_known(tables, SECTIONS, "recipe")
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError.for_value(name, table, "a table")
    folder, learner = _read(tables, "model")
    sampler, client, launched = _read_sampler(tables)
    run, trainer = _read(tables, "trainer")
    require_count("trainer.steps", run["steps"], least=1)
    saved, checkpointing = _read(tables, "checkpoint")
    [publication] = _read(tables, "publication")
    [rollout] = _read(tables, "rollout")
    [evaluation] = _read(tables, "evaluation")
    left, rollouts = _read(tables, "run")
    rules: dict[str, Any] = {name: read_table(kind, tables.get(name, {}), name) for name, kind in _RULES.items()}
    return Recipe(
        path=path,
        tables=tables,
        model=ModelFolder(**folder),
        learner=learner,
        env=_read_open(Environment, tables.get("env", {}), "env"),
        data=_read_open(DataFiles, tables.get("data", {}), "data"),
        sampler=sampler,
        client=client,
        launched=launched,
        policy={"publication": publication.pop("method"), "sampler_threads": launched["threads"], **publication},
        engine=rollout | {name: rules[name] for name in ("budget", "schedule", "failures")},
        trainer=trainer
        | {name: rules[name] for name in ("completion", "truncation")}
        | {
            "optimizer": _read_optimizer(tables),
            "advantage": _read_advantage(tables.get("advantage", {})),
            "loss": loss_from(trainer["loss"], **tables.get("loss", {})),
        },
        steps=run["steps"],
        evaluation=evaluation,
        checkpointing=checkpointing if saved["enabled"] else None,
        run=RunFolder(**left),
        rollouts=KeptRollouts(**rollouts),
    )


def _read(tables: Table, name: str) -> list[dict[str, Any]]:
    """The values of a section, apart by what they are for."""
    parts = SECTIONS[name]
    values = read_keywords({key: rule for part in parts for key, rule in part.items()}, tables.get(name, {}), name)
    return [{key: values[key] for key in part} for part in parts]


def _read_open(kind: type[_Open], table: Table, where: str) -> _Open:
    """A section whose other keys are keywords of the user's own functions."""
    [keys] = SECTIONS[where]
    own = {key: value for key, value in table.items() if key in keys}
    options = {key: value for key, value in table.items() if key not in keys}
    return dataclasses.replace(read_table(kind, own, where), options=options)


def _read_advantage(table: Table) -> Advantage:
    kind = table.get("kind", "group_centered")
    if not isinstance(kind, str) or kind not in _ADVANTAGES:
        raise ConfigError.for_value("advantage.kind", kind, "one of " + ", ".join(map(repr, _ADVANTAGES)))
    return read_table(_ADVANTAGES[kind], {key: value for key, value in table.items() if key != "kind"}, "advantage")


def _read_optimizer(tables: Table) -> Adam:
    adam, shape, shapes = _read(tables, "optimizer")
    if shapes["schedule"] != "constant":
        falling = linear if shapes["schedule"] == "linear" else cosine
        return Adam(**adam, schedule=falling(**shape))
    if shape["floor"]:
        raise ConfigError.for_value("optimizer.schedule", "constant", "'linear' or 'cosine' if floor is set")
    return Adam(**adam, schedule=constant(warmup=shape["warmup"]) if shape["warmup"] else None)


def _read_sampler(tables: Table) -> tuple[Servers, Keywords, Keywords]:
    """The servers, and the keywords of ``SGLang`` and ``SGLangOptions``; refuses keys that are about other servers."""
    own, client, launched = _read(tables, "sampler")
    sampler = Servers(**own)
    uses = (
        (sampler.named, {*client, "admin_key_env"}, "servers of sampler.urls or sampler.urls_file"),
        (sampler.launches, {*launched, "servers"}, "servers of backend 'sglang' that the run starts"),
    )
    for name, value in tables.get("sampler", {}).items():
        about = [(applies, what) for applies, keys, what in uses if name in keys and name != "threads"]
        default = next(part[name].default for part in SECTIONS["sampler"] if name in part)
        if (own | client | launched)[name] != default and about and not any(applies for applies, _ in about):
            allowed = "left out" if default is None else f"{default!r} or left out"
            what = " or ".join(what for _, what in about)
            raise ConfigError.for_value(f"sampler.{name}", value, f"{allowed}, for it is about {what}")
    return sampler, client, launched
