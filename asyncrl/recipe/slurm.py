"""One sbatch script from a recipe: the learner's ranks, its SGLang servers, and the driver between them.

``lay_out`` decides which node has which part, and ``render`` writes the script, ``slurm.sh``. The job has its nodes for
itself. On one node all parts share the GPUs; on more the ranks have the first nodes and the servers the others. The
driver is light, and runs on the first.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, require_count
from asyncrl.recipe.compose import server_options
from asyncrl.recipe.config import SECTIONS, Recipe
from asyncrl.servers.serving import flags_of

__all__ = ["Layout", "Server", "SlurmOptions", "lay_out", "render"]

KEY_NAME = "ASYNCRL_SERVERS_KEY"
_TEMPLATE = Path(__file__).with_name("slurm.sh")
_FIRST_PORT = 30_000
_LOCAL_KEYS = ("ranks", "worker")
# Of [model]: the ranks that a run starts itself, which the job starts in its place.


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What the cluster is asked for. What is None is left to its own defaults."""

    gpus_per_node: int = 8
    """GPUs of each node."""
    nodes: int | None = None
    """Nodes of the job. None: as few as the recipe's ranks and servers fit on."""
    partition: str | None = None
    """Where the job waits for its nodes."""
    account: str | None = None
    """Who pays."""
    time: str | None = None
    """How long the job may run, as sbatch reads it: ``1-12:00:00``. Three minutes before its end the run is stopped in
    order."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, written ``--sbatch=--constraint=h100``; each is a line of the script."""

    def __post_init__(self) -> None:
        require_count("--gpus-per-node", self.gpus_per_node, least=1)
        if self.nodes is not None:
            require_count("--nodes", self.nodes, least=1)
        for name in ("partition", "account", "time"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[\w.,:@+-]+", value):
                raise ConfigError.for_value(f"--{name}", value, "a word, as sbatch takes it")
        for line in self.sbatch:
            if not re.fullmatch(r"--?[a-zA-Z][^\r\n]*", line):
                raise ConfigError.for_value("--sbatch", line, "one option of sbatch, such as --constraint=h100")

    def lines(self) -> list[str]:
        """Options of sbatch beyond those that each job has; the user's own come last, and win."""
        named = [f"--{name}={value}" for name in ("partition", "account", "time") if (value := getattr(self, name))]
        return [*named, *self.sbatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where one server runs: the number of its node in the job, and the numbers of its GPUs there."""

    node: int
    gpus: tuple[int, ...]
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which node has what: the learner's ranks are on the first ``learner_nodes``, equally many on each."""

    nodes: int
    learner_nodes: int
    ranks_per_node: int
    servers: tuple[Server, ...]


def lay_out(options: SlurmOptions, *, ranks: int, servers: int, tensor_parallel: int) -> Layout:
    """Place all parts. Raises ``ConfigError`` for what does not fit on the nodes."""
    gpus = options.gpus_per_node
    if tensor_parallel > gpus:
        raise ConfigError.for_value("sampler.tensor_parallel", tensor_parallel, f"at most {gpus}, the GPUs of a node")
    learner_nodes = next(count for count in range(ceil(ranks / gpus), ranks + 1) if ranks % count == 0)
    least = learner_nodes + ceil(servers / (gpus // tensor_parallel))
    if ranks + servers * tensor_parallel <= gpus:
        least = 1
    nodes, most = options.nodes or least, learner_nodes + servers
    if not least <= nodes <= most:
        needs = f"model.ranks = {ranks} and sampler.servers = {servers}, {tensor_parallel} GPUs each"
        raise ConfigError.for_value("--nodes", nodes, f"between {least} and {most} for {needs}, with {gpus} a node")
    shared = nodes == 1
    first, spread = (0, 1) if shared else (learner_nodes, nodes - learner_nodes)
    placed = []
    for number in range(servers):
        begin = number // spread * tensor_parallel + (ranks if shared else 0)
        mine = tuple(range(begin, begin + tensor_parallel))
        placed.append(Server(node=first + number % spread, gpus=mine, port=_FIRST_PORT + number))
    return Layout(
        nodes=nodes, learner_nodes=learner_nodes, ranks_per_node=ranks // learner_nodes, servers=tuple(placed)
    )


def render(recipe: Recipe, options: SlurmOptions, *, overrides: Sequence[str] = (), run_dir: Path | None = None) -> str:
    """The script. Paths in it are those of this machine: the nodes must see them too.

    Raises ``ConfigError`` for a recipe whose servers or ranks are not the run's own.
    """
    import jinja2

    try:
        _require_own_parts(recipe)
        servers, ranks = recipe.sampler.servers, recipe.learner["ranks"]
        layout = lay_out(options, ranks=ranks, servers=servers, tensor_parallel=recipe.launched["tensor_parallel"])
        server_command = _server_command(recipe)
    except ConfigError as error:
        raise ConfigError(f"{recipe.path}: {error}") from error
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    values: dict[str, Any] = {
        "name": re.sub(r"[^\w.-]+", "-", recipe.path.resolve().parent.name) or "asyncrl",
        "lines": options.lines(),
        "gpus": options.gpus_per_node,
        "layout": layout,
        "directory": Path.cwd(),
        "python": sys.executable,
        "recipe": recipe.path.resolve(),
        "run": None if run_dir is None else run_dir.absolute(),
        "runs": Path(recipe.run.directory).absolute(),
        "timeout_s": recipe.learner["rank_timeout_s"],
        "server_command": server_command,
        "own_key": recipe.sampler.api_key_env is None,
        "key_name": recipe.sampler.api_key_env or KEY_NAME,
        "settings": [*overrides, *_left_to_the_job(recipe)],
    }
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)


def _require_own_parts(recipe: Recipe) -> None:
    """A job is for a recipe that says how many ranks and SGLang servers the run has, not where they are."""
    sampler = recipe.sampler
    if sampler.backend != "sglang":
        raise ConfigError.for_value("sampler.backend", sampler.backend, "'sglang': the job starts servers of its own")
    if sampler.named:
        key, value = ("urls", list(sampler.urls)) if sampler.urls else ("urls_file", sampler.urls_file)
        raise ConfigError.for_value(f"sampler.{key}", value, "left out: the job starts servers of its own")
    if recipe.learner["address"] is not None:
        allowed = "left out: the job starts ranks of its own, as many as model.ranks says"
        raise ConfigError.for_value("model.address", recipe.learner["address"], allowed)
    if recipe.launched["gpus"]:
        allowed = "left out: the job says which GPUs of a node a server has"
        raise ConfigError.for_value("sampler.gpus", list(recipe.launched["gpus"]), allowed)
    if recipe.model.source is not None:
        allowed = "left out: servers on other nodes need model.path, a folder that they see or a name of the hub"
        raise ConfigError.for_value("model.source", recipe.model.source, allowed)


def _server_command(recipe: Recipe) -> list[str]:
    """Arguments of ``asyncrl`` for a server as the run would start it, but for its port."""
    path = Path(str(recipe.model.path)).expanduser()
    local = recipe.path.resolve().parent / path
    # Whoever may reach the node may try the port, and the key is the job's.
    made = replace(server_options(recipe, local if local.exists() else path), host="0.0.0.0", api_key="-")
    download = ["--download"] if recipe.model.download else []
    return ["serve", "--backend", "sglang", *download, *flags_of(made)]


def _left_to_the_job(recipe: Recipe) -> list[str]:
    """Overrides that take out of the recipe what the job starts in its place."""
    _, client, launched = SECTIONS["sampler"]
    servers = [key for key in recipe.tables.get("sampler", {}) if key in {*launched, "servers"} - {*client, "threads"}]
    ranks = [key for key in recipe.tables.get("model", {}) if key in _LOCAL_KEYS]
    return [*(f"sampler.{key}=" for key in servers), *(f"model.{key}=" for key in ranks)]
