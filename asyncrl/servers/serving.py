"""``asyncrl serve``: a server in the foreground, the embedded one or a real SGLang.

Reads the options and hands them to whoever serves. Both print one JSON line with the URL on stdout when they are ready,
log to stderr, and end in order at SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio

from asyncrl.errors import ConfigError, ServerUnavailable
from asyncrl.learning.lora import LoraConfig
from asyncrl.servers.machine import read_secret
from asyncrl.servers.sglangcommand import SGLangOptions

__all__ = ["UntilSignal", "add_server_options", "serve"]

UntilSignal: TypeAlias = Callable[[Callable[[], Awaitable[None]]], Awaitable[bool]]
"""Awaits a function's coroutine, and cancels it at a signal."""

_PORT = 30_000
_EMBEDDED_ONLY = ("exit_with_stdin",)
_SGLANG_ONLY = (
    *("device", "tensor_parallel", "lora_rank", "lora_modules", "max_loras_per_batch", "memory_fraction", "python"),
    *("admin_key_env", "allow_version", "arguments"),
)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Options that are not given are left to ``ServerOptions`` or ``SGLangOptions``, which have the defaults."""
    unset: Any = argparse.SUPPRESS

    def add(group: argparse._ArgumentGroup, flag: str, **options: Any) -> None:
        group.add_argument(flag, **{"default": unset, **options})

    parser.add_argument(
        "--backend", choices=("embedded", "sglang"), default="embedded", help="our own small server, or a real SGLang"
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="model folder with its tokenizer")
    both = parser.add_argument_group("both backends")
    add(both, "--api-key-env", metavar="NAME", help="variable with the key that clients must send")
    add(both, "--host", help="address to listen on")
    add(both, "--port", type=int, help=f"0 lets the system choose (default: {_PORT})")
    add(both, "--threads", type=int, help="threads of torch")
    add(both, "--dtype", help="of the weights")
    add(both, "--context-length", type=int, metavar="TOKENS")
    add(both, "--max-running-requests", type=int, metavar="N")
    add(both, "--max-total-tokens", type=int, metavar="TOKENS", help="size of the KV cache")
    own = parser.add_argument_group("embedded only")
    add(own, "--exit-with-stdin", action="store_true", help="end when standard input is closed")
    real = parser.add_argument_group("sglang only")
    add(real, "--device", choices=("auto", "cpu", "cuda"))
    add(real, "--tensor-parallel", type=int, metavar="GPUS")
    add(real, "--lora-rank", type=int, metavar="R", help="serve adapters up to this rank")
    add(real, "--lora-modules", nargs="+", metavar="NAME", help="that adapters change (default: all linear layers)")
    add(real, "--max-loras-per-batch", type=int, metavar="N")
    add(real, "--memory-fraction", type=float, metavar="X", help="of a GPU's memory")
    add(real, "--python", type=Path, metavar="PATH", help="interpreter that has SGLang")
    add(real, "--admin-key-env", metavar="NAME", help="variable with the key of the control routes")
    add(real, "--allow-version", action="store_true", help="take a version that is not known to work")
    add(real, "arguments", nargs="*", help="after --: further arguments of SGLang's own command")


def serve(arguments: argparse.Namespace, *, say: Callable[[str], None], until_signal: UntilSignal) -> None:
    """Serve until a signal. Raises ``ConfigError`` before anything starts, ``ServerUnavailable`` if SGLang ends."""
    options = {
        key: value for key, value in vars(arguments).items() if key not in ("command", "debug", "phase", "backend")
    }
    options = {key: value for key, value in options.items() if value != []}
    _refuse(options, _SGLANG_ONLY if arguments.backend == "embedded" else _EMBEDDED_ONLY, arguments.backend)
    for name, key in (("api_key_env", "api_key"), ("admin_key_env", "admin_key")):
        if name in options:
            options[key] = read_secret(f"--{name.replace('_', '-')}", options.pop(name))
    if arguments.backend == "embedded":
        say("loading torch and the model")
        from asyncrl.servers.serve import ServerOptions, run_server

        run_server(ServerOptions(**options))
        return
    found = read_options(options)

    async def work() -> None:
        await _serve_sglang(found, say)

    anyio.run(until_signal, work, backend="asyncio")


def read_options(options: Mapping[str, Any]) -> SGLangOptions:
    """The options of a real server from those of the command line."""
    found = {"port": _PORT, **options}
    rank, modules = found.pop("lora_rank", None), found.pop("lora_modules", None)
    if rank is not None:
        found["lora"] = LoraConfig(r=rank, target_modules=tuple(modules) if modules else "all-linear")
    elif modules or "max_loras_per_batch" in found:
        raise ConfigError("--lora-modules and --max-loras-per-batch are about adapters, which need --lora-rank")
    return SGLangOptions(**found | {"arguments": tuple(found.pop("arguments", ()))})


async def _serve_sglang(options: SGLangOptions, say: Callable[[str], None]) -> None:
    from asyncrl.servers.sglangcommand import plan_here
    from asyncrl.servers.sglangserver import free_ports, running, server_url

    options = replace(options, port=options.port or free_ports(1)[0])
    command = plan_here(options)
    say("starting SGLang")
    async with running(command, options, to_stderr=True) as child:
        print(json.dumps({"ready": True, "url": server_url(options), "pid": os.getpid()}), flush=True)
        code = await child.process.wait()
        raise ServerUnavailable(await child.how_it_ended(code))


def _refuse(options: Mapping[str, Any], foreign: tuple[str, ...], backend: str) -> None:
    for name in options:
        if name in foreign:
            flag = "arguments after --" if name == "arguments" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: is not an option of --backend {backend}")
