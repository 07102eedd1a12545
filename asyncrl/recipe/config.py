"""Recipes: a run as a TOML file, read into values.

``load_recipe`` checks every key and value without importing the user's code, the model or torch; ``compose`` builds the
run from the result. Each table is one section below. The tables of the schedule, the budget and the like are the fields
of the objects that Python users pass, so that a knob is described once, beside the rule that it feeds.

Paths and references (``env.py:GuessNumber``) are relative to the recipe; the run directory to where the command runs.
Nothing here reads the environment of the process: ``servers/machine.py`` does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_type_hints

from asyncrl.errors import ConfigError, require_count
from asyncrl.learning.advantages import Batchwise, GroupCentered
from asyncrl.learning.lora import LoraConfig
from asyncrl.learning.normalize import Normalize
from asyncrl.learning.optimizer import Adam, cosine
from asyncrl.learning.torch_learner import DType
from asyncrl.plain import shown
from asyncrl.publishing.base import BUCKET_BYTES
from asyncrl.publishing.methods import Publication
from asyncrl.recipe.tables import Table, override, parse_tables, read_table, require_known
from asyncrl.rollout.budget import Budget
from asyncrl.rollout.failures import Failures
from asyncrl.sampling.wire import PauseMode
from asyncrl.scheduling.rules import (
    BatchOrder,
    ForwardBackwardBatch,
    GroupCompletion,
    KVCache,
    SamplingPolicy,
    Schedule,
    StalePolicy,
    Truncation,
)
from asyncrl.servers.machine import cache_directory, read_secret

__all__ = [
    "CheckpointSection",
    "DataSection",
    "EnvSection",
    "EvaluationSection",
    "ModelSection",
    "PublicationSection",
    "Recipe",
    "RolloutSection",
    "RunSection",
    "SamplerSection",
    "TrainerSection",
    "cache_directory",
    "load_recipe",
]

Advantage: TypeAlias = GroupCentered | Batchwise
_ADVANTAGES: Mapping[str, type[Advantage]] = {"group_centered": GroupCentered, "batchwise": Batchwise}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """``[model]``: what is trained; see ``TorchLearner``. Exactly one of ``path`` and ``source``."""

    path: str | None = None
    """Model folder with its tokenizer."""
    source: str | None = None
    """Reference to ``function(directory: Path) -> None`` that writes a model folder; it is called once, then cached."""
    lora: LoraConfig | None = None
    """Train an adapter; without it all weights."""
    dtype: DType = "float32"
    device: str = "auto"
    threads: int | None = None
    micro_batch_tokens: int = 4096
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if (self.path is None) == (self.source is None):
            raise ConfigError("[model] must have exactly one of path (a model folder) and source (a function)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSection:
    """``[env]``: where the reward comes from. Every key but ``factory`` is a keyword of the environment."""

    factory: str
    """Reference to an ``Env`` class or a function that returns one."""
    options: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """``[data]``: references to functions without arguments that return lists of rows."""

    train: str
    heldout: str | None = None
    """Evaluated before the first and after the last step, and as often as ``[evaluation]`` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSection:
    """``[sampler]``: the embedded server in a process of its own; SGLang servers by URL, or of our own without URLs."""

    backend: Literal["embedded", "sglang"] = "embedded"
    urls: tuple[str, ...] = ()
    """Of SGLang servers that run, or one ``dns+http://name:port`` for all addresses of a name; without any, servers are
    started on this machine for the run."""
    urls_file: str | None = None
    """Instead of ``urls``: a file with one URL a line, which is read again while the run goes on."""
    router: str | None = None
    """URL of a router in front of these servers, for sampling requests."""
    threads: int = 1
    """Of the embedded server, and of an SGLang server of our own on a CPU."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' key; the key itself has no place in a recipe."""
    admin_key_env: str | None = None
    """The same for the key of control routes, if the servers have one beside the other."""
    servers: int = 1
    """SGLang servers of our own; this and the next ones only for those."""
    tensor_parallel: int = 1
    """GPUs of each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    python: str | None = None
    """Interpreter that has SGLang; see ``SGLangOptions``."""
    arguments: tuple[str, ...] = ()
    """Further arguments of SGLang's command, as it spells them."""

    def __post_init__(self) -> None:
        for name in ("threads", "servers", "tensor_parallel"):
            require_count(f"sampler.{name}", getattr(self, name), least=1)
        if self.urls and self.backend == "embedded":
            raise ConfigError.for_value("sampler.urls", list(self.urls), "left out for backend 'embedded'")
        if self.urls_file is not None and (self.urls or self.backend == "embedded"):
            allowed = "left out for backend 'embedded' and beside sampler.urls"
            raise ConfigError.for_value("sampler.urls_file", self.urls_file, allowed)
        for name in ("router", "admin_key_env"):
            if getattr(self, name) is not None and not (self.urls or self.urls_file):
                allowed = "left out, for it is about servers of sampler.urls or sampler.urls_file"
                raise ConfigError.for_value(f"sampler.{name}", getattr(self, name), allowed)
        if not self.launches:
            for name, unset in (
                ("servers", 1),
                ("tensor_parallel", 1),
                ("device", "auto"),
                ("python", None),
                ("arguments", ()),
            ):
                if getattr(self, name) != unset:
                    allowed = f"{unset!r} or left out, for it is about servers of backend 'sglang' that the run starts"
                    raise ConfigError.for_value(f"sampler.{name}", getattr(self, name), allowed)

    @property
    def launches(self) -> bool:
        """True if the run starts real SGLang servers."""
        return self.backend == "sglang" and not self.urls and self.urls_file is None

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
class PublicationSection:
    """``[publication]``: how a new version reaches the servers; see ``Policy``."""

    method: Publication = "disk"
    """"tensors" and "distributed" (full weights only) need no file system that servers share."""
    pause_mode: PauseMode = "retract"
    """Full weights: what becomes of requests that run when an update comes."""
    bucket_bytes: int = BUCKET_BYTES
    """Of one piece of the weights, with other methods than "disk"."""
    probe_tolerance: float = 1e-3
    """Largest log-probability difference between servers and learner; bfloat16 needs some tenths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    """``[rollout]``: how the policy is sampled; see ``RolloutEngine``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    """Of every random choice of the run: sampling, and the initial adapter."""
    sampling_policy: SamplingPolicy = "trajectory"
    kv_cache: KVCache | None = None
    renderer: Literal["auto", "chat", "text"] = "chat"
    template_options: Table | None = None
    """Variables of the chat template, such as ``enable_thinking``."""
    stop: tuple[str, ...] = ()
    environment_timeout: float = 600.0
    """Seconds."""
    trajectory_timeout: float | None = None
    """Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection:
    """``[trainer]``: the loop; see ``AsyncTrainer``."""

    steps: int
    groups_per_step: int
    group_size: int = 16
    max_staleness: int = 2
    loss: str = "cispo"
    """Its options are in ``[loss]``."""
    normalize: Normalize = "token"
    stale_policy: StalePolicy = "wait"
    batch_order: BatchOrder = "completion"
    repeat_dataset: bool = True
    forward_backward_batch: Literal["auto", "off"] | ForwardBackwardBatch = "auto"
    allow_trajectory_loss: bool = False
    allow_unbounded_staleness: bool = False

    def __post_init__(self) -> None:
        require_count("trainer.steps", self.steps, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSection:
    """``[evaluation]`` of the rows of ``data.heldout``; see ``Evaluator``."""

    every: int = 0
    group_size: int = 2
    temperature: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """``[checkpoint]``: the run's state in its folder, so that ``--resume`` goes on; see ``Checkpointing``."""

    enabled: bool = True
    weights_every: int = 20
    """Optimizer steps."""
    rollout_every: float = 60.0
    """Seconds."""

    def __post_init__(self) -> None:
        require_count("checkpoint.weights_every", self.weights_every, least=1)
        if not 0 < self.rollout_every < math.inf:
            raise ConfigError.for_value("checkpoint.rollout_every", self.rollout_every, "more than 0 seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """``[run]``: what is left of a run."""

    directory: str = "runs"
    """Each run gets a new folder in it."""
    log: Literal["console", "json"] = "console"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole run as values; ``tables`` is what the file and the overrides said."""

    path: Path
    tables: Table
    model: ModelSection
    env: EnvSection
    data: DataSection
    trainer: TrainerSection
    optimizer: Adam
    sampler: SamplerSection
    publication: PublicationSection
    rollout: RolloutSection
    budget: Budget
    schedule: Schedule
    failures: Failures
    completion: GroupCompletion
    truncation: Truncation
    loss: Table
    """Options of ``trainer.loss``."""
    advantage: Advantage
    evaluation: EvaluationSection
    checkpoint: CheckpointSection
    run: RunSection


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
    kinds = {name: kind for name, kind in get_type_hints(Recipe).items() if name not in ("path", "tables")}
    require_known(tables, kinds, "recipe")
    special = {"env": _read_env, "loss": _read_loss, "advantage": _read_advantage, "optimizer": _read_optimizer}
    sections: dict[str, Any] = {}
    for name, kind in kinds.items():
        table = tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConfigError.for_value(name, table, "a table")
        sections[name] = special[name](table) if name in special else read_table(kind, table, name)
    return Recipe(path=path, tables=tables, **sections)


def _read_env(table: Table) -> EnvSection:
    factory = {key: value for key, value in table.items() if key == "factory"}
    options = {key: value for key, value in table.items() if key != "factory"}
    return dataclasses.replace(read_table(EnvSection, factory, "env"), options=options)


def _read_loss(table: Table) -> Table:
    return table


def _read_advantage(table: Table) -> Advantage:
    kind = table.get("kind", "group_centered")
    if not isinstance(kind, str) or kind not in _ADVANTAGES:
        raise ConfigError.for_value("advantage.kind", kind, "one of " + ", ".join(map(repr, _ADVANTAGES)))
    return read_table(_ADVANTAGES[kind], {key: value for key, value in table.items() if key != "kind"}, "advantage")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LearningRate:
    """The keys of ``[optimizer]`` that say how ``lr`` changes over the run; the others are Adam's."""

    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule == "constant" and (self.warmup or self.floor):
            raise ConfigError.for_value("optimizer.schedule", self.schedule, "'cosine' if warmup or floor is set")


def _read_optimizer(table: Table) -> Adam:
    own = {entry.name for entry in dataclasses.fields(_LearningRate)}
    adam = {entry.name for entry in dataclasses.fields(Adam)}
    require_known(table, adam | own, "optimizer")
    rate = read_table(_LearningRate, {key: value for key, value in table.items() if key in own}, "optimizer")
    optimizer = read_table(Adam, {key: value for key, value in table.items() if key not in own}, "optimizer")
    if rate.schedule == "constant":
        return optimizer
    return dataclasses.replace(optimizer, schedule=cosine(warmup=rate.warmup, floor=rate.floor))
