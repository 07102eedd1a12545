"""How a real SGLang server is started: from options and what the machine has to a command.

``plan_command`` is the whole decision. It promises a server that downloads nothing, listens where it was told,
and whose keys stand neither on the command line nor in its environment. Running it is the business of ``sglangserver``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from asyncrl.errors import ConfigError, require_count
from asyncrl.learning.modelfolder import find_model
from asyncrl.learning.options import LoraConfig
from asyncrl.servers.install import installed_python
from asyncrl.servers.machine import has_module, visible_gpus

__all__ = ["Command", "LoraConfig", "Machine", "SGLangOptions", "plan_command", "plan_here", "split_gpus"]

Device = Literal["auto", "cpu", "cuda"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHIM = Path(__file__).with_name("cpu_shim")
_ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_OURS = ("--api-key", "--admin-api-key", "--host", "--port", "--model-path", "--model", "--config", "--device")
_CPU_MULTIPLE = 32
_CPU_TOKENS = 32_768
_CPU_REQUESTS = 64
# Of a CPU's own choice would be half of the memory, and thousands of requests that no CPU serves at once.


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangOptions:
    """A real SGLang server on this machine. What is None is left to SGLang, if nothing else is said."""

    model: Path
    """Folder with a model and its tokenizer, or a name of the Hugging Face hub that is in the local cache."""
    python: Path | None = None
    """Interpreter that has SGLang; None: this one if it has, else what ``asyncrl install-sglang`` made."""
    device: Device = "auto"
    """``auto``: the GPUs if there are any, unless the interpreter is the one of ``asyncrl install-sglang``."""
    tensor_parallel: int = 1
    """GPUs of one server."""
    gpus: tuple[str, ...] = ()
    """Names for ``CUDA_VISIBLE_DEVICES``; empty: all that this process sees."""
    lora: LoraConfig | None = None
    """Serve adapters up to its rank, of its modules. Without it only whole models can be published."""
    max_loras_per_batch: int = 8
    """Adapters that running requests use at once: the versions in flight."""
    max_loaded_loras: int | None = None
    """Adapters that are in a server's memory. None: without a limit; the publisher unloads what nobody uses."""
    lora_backend: str | None = None
    """SGLang's implementation of adapters, such as ``triton``."""
    dtype: str | None = None
    """None: float32 on a CPU, the model's own on a GPU."""
    context_length: int | None = None
    """Longest conversation in tokens, with its answer. None: what the model was made for."""
    max_running_requests: int | None = None
    """Requests that a server answers at once; further ones queue. None: 64 on a CPU."""
    max_total_tokens: int | None = None
    """Tokens in the KV memory. None: 32,768 on a CPU."""
    memory_fraction: float | None = None
    """Part of a GPU's memory, between 0 and 1, for weights and KV."""
    threads: int = 1
    """Threads of torch, on a CPU."""
    host: str = "127.0.0.1"
    """Anything but loopback needs ``api_key``."""
    port: int = 0
    """0: one that is free."""
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    """For the control routes; they take ``api_key`` no longer then."""
    seed: int = 0
    arguments: tuple[str, ...] = ()
    """Further arguments of SGLang's own command, as it spells them; they win over ours."""
    allow_version: bool = False
    """Take a version of SGLang that is not known to work."""
    start_timeout_s: float = 600.0
    """Seconds that a server may take to start. Half a minute is usual on a CPU, minutes for a large
    model or a cold disk."""

    def __post_init__(self) -> None:
        if self.host not in _LOOPBACK and not self.api_key:
            raise ConfigError.for_value("host", self.host, f"one of {', '.join(_LOOPBACK)}, or be used with an API key")
        if not 0 <= self.port <= 65_535:
            raise ConfigError.for_value("port", self.port, "between 0 and 65535")
        if self.memory_fraction is not None and not 0 < self.memory_fraction < 1:
            raise ConfigError.for_value("memory_fraction", self.memory_fraction, "between 0 and 1")
        if not self.start_timeout_s > 0:
            raise ConfigError.for_value("start_timeout_s", self.start_timeout_s, "more than 0 seconds")
        for name in ("tensor_parallel", "max_loras_per_batch", "threads"):
            require_count(name, getattr(self, name), least=1)
        for name in ("context_length", "max_running_requests", "max_total_tokens", "max_loaded_loras"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), least=1)
        _check_arguments(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a server can be started with."""

    interpreter: Path
    """This Python."""
    has_sglang: bool
    """It can import SGLang."""
    installed: Path | None
    """The one that ``asyncrl install-sglang`` made."""
    gpus: tuple[str, ...]

    @classmethod
    def found(cls) -> Machine:
        """This machine. Reads the disk."""
        return cls(
            interpreter=Path(sys.executable),
            has_sglang=has_module("sglang"),
            installed=installed_python(),
            gpus=visible_gpus(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is run."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """Added to the own one."""
    secrets: Mapping[str, str] = field(repr=False)
    """Options that have to come from a file that nobody else can read."""


def plan_here(options: SGLangOptions) -> Command:
    """The command on this machine; reads the disk. Raises ``ConfigError``, also for a model that cannot be served."""
    options = replace(options, model=find_model(options.model))
    machine = Machine.found()
    command = plan_command(options, machine)
    if options.lora and _device(options, machine, _interpreter(options, machine)) == "cpu":
        _check_padding(json.loads((options.model / "config.json").read_bytes()), options)
    return command


def _check_padding(config: Mapping[str, object], options: SGLangOptions) -> None:
    """On a CPU SGLang rounds this size up, but not that of adapters, whose first use would then end the server."""
    size = config.get("intermediate_size")
    if isinstance(size, int) and size % _CPU_MULTIPLE:
        allowed = (
            f"a model whose intermediate_size is a multiple of {_CPU_MULTIPLE}, for adapters on a CPU: it is {size}"
        )
        raise ConfigError.for_value("model", str(options.model), allowed)


def plan_command(options: SGLangOptions, machine: Machine) -> Command:
    """The command for ``options``, whose port must be chosen. Raises ``ConfigError`` if the machine lacks something."""
    python = _interpreter(options, machine)
    device = _device(options, machine, python)
    flags: dict[str, object] = {
        "model-path": options.model,
        "host": options.host,
        "port": options.port,
        "device": device,
        "dtype": options.dtype,
        "context-length": options.context_length,
        "max-running-requests": options.max_running_requests,
        "max-total-tokens": options.max_total_tokens,
        "mem-fraction-static": options.memory_fraction,
        "random-seed": options.seed,
        # A line for each request would fill disks.
        "log-level-http": "warning",
    }
    flags |= _cpu_flags(options) if device == "cpu" else {"tp": options.tensor_parallel}
    arguments = [str(python), "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is not None:
            arguments += [f"--{name}", str(value)]
    arguments += _lora_arguments(options, device)
    if device == "cpu":
        arguments += ["--disable-overlap-schedule", "--sleep-on-idle"]
    secrets = {"api-key": options.api_key, "admin-api-key": options.admin_key}
    return Command(
        arguments=(*arguments, *options.arguments),
        environment=_environment(options, device),
        secrets={name: value for name, value in secrets.items() if value},
    )


def split_gpus(options: SGLangOptions, machine: Machine, servers: int) -> list[tuple[str, ...]]:
    """The GPUs of each of several servers, ``tensor_parallel`` each; on a CPU or for one server, what was chosen."""
    if servers == 1 or _device(options, machine, _interpreter(options, machine)) == "cpu":
        return [options.gpus] * servers
    gpus = options.gpus or machine.gpus
    size = options.tensor_parallel
    if len(gpus) < servers * size:
        raise ConfigError.for_value("servers", servers, f"at most {len(gpus) // size}: {len(gpus)} GPUs, {size} each")
    return [gpus[index * size : (index + 1) * size] for index in range(servers)]


def _check_arguments(arguments: tuple[str, ...]) -> None:
    for argument in arguments:
        if argument.partition("=")[0] in _OURS:
            raise ConfigError.for_value("arguments", argument, f"none of {', '.join(_OURS)}: they have options here")


def _interpreter(options: SGLangOptions, machine: Machine) -> Path:
    if options.python is not None:
        if not options.python.is_file():
            raise ConfigError.for_value("python", str(options.python), "a Python interpreter that has SGLang")
        return options.python
    if machine.has_sglang:
        return machine.interpreter
    if machine.installed is None:
        raise ConfigError(
            "SGLang is not installed: `asyncrl install-sglang` makes an environment for its CPU server; "
            "on a machine with a GPU, `pip install 'asyncrl[sglang]'` adds it to this one"
        )
    return machine.installed


def _device(options: SGLangOptions, machine: Machine, python: Path) -> Literal["cpu", "cuda"]:
    gpus = options.gpus or machine.gpus
    device = options.device
    if device == "auto":
        device = "cuda" if gpus and python != machine.installed else "cpu"
    if device == "cuda" and not gpus:
        raise ConfigError.for_value("device", device, "'cpu' or 'auto': this machine shows no GPU")
    most = len(gpus) if device == "cuda" else 1
    if options.tensor_parallel > most:
        why = "the GPUs that a server has" if device == "cuda" else "without a GPU"
        raise ConfigError.for_value("tensor_parallel", options.tensor_parallel, f"at most {most}, {why}")
    return device


def _cpu_flags(options: SGLangOptions) -> dict[str, object]:
    """SGLang's CPU engine without compiled kernels: everything in plain torch."""
    return {
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        "dtype": options.dtype or "float32",
        "max-total-tokens": options.max_total_tokens or _CPU_TOKENS,
        "max-running-requests": options.max_running_requests or _CPU_REQUESTS,
    }


def _lora_arguments(options: SGLangOptions, device: str) -> list[str]:
    lora = options.lora
    if lora is None:
        return []
    modules = _ALL_LINEAR if isinstance(lora.target_modules, str) else lora.target_modules
    found = ["--enable-lora", "--max-lora-rank", str(lora.r), "--max-loras-per-batch", str(options.max_loras_per_batch)]
    if options.max_loaded_loras is not None:
        found += ["--max-loaded-loras", str(options.max_loaded_loras)]
    backend = options.lora_backend or ("torch_native" if device == "cpu" else None)
    if backend is not None:
        found += ["--lora-backend", backend]
    return [*found, "--lora-target-modules", *modules]


def _environment(options: SGLangOptions, device: str) -> dict[str, str]:
    common = {"HF_HUB_OFFLINE": "1"}
    if device == "cuda":
        return common | ({"CUDA_VISIBLE_DEVICES": ",".join(options.gpus)} if options.gpus else {})
    return common | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(options.threads),
        # In the place of ours, for nothing of it is meant for SGLang's own environment.
        "PYTHONPATH": str(_SHIM),
    }
