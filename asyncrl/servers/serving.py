"""``asyncrl serve``: a server in the foreground, the embedded one or a real SGLang.

Hands what the user wrote to whoever serves. Both print one JSON line with the URL on stdout when they are ready,
log to stderr, and end in order at SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import anyio

from asyncrl.errors import ConfigError, ServerUnavailable
from asyncrl.flags import add_flags
from asyncrl.learning.modelfolder import find_model
from asyncrl.learning.options import LoraConfig
from asyncrl.servers.embedded.options import ServerOptions
from asyncrl.servers.machine import read_secret
from asyncrl.servers.sglangcommand import SGLangOptions

__all__ = ["UntilSignal", "add_server_flags", "flags_of", "read_options", "serve"]

UntilSignal: TypeAlias = Callable[[Callable[[], Awaitable[None]]], Awaitable[bool]]
"""Awaits a function's coroutine, and cancels it at a signal."""

_OTHER_FLAGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "api_key": {"--api-key-env": {"metavar": "NAME", "help": "variable with the key that clients must send"}},
    "admin_key": {"--admin-key-env": {"metavar": "NAME", "help": "variable with the key of the control routes"}},
    "lora": {
        "--lora-rank": {"metavar": "R", "type": int, "help": "serve adapters up to this rank"},
        "--lora-modules": {
            "metavar": "NAME",
            "nargs": "+",
            "help": "that adapters change (all linear layers)",
        },
    },
    "arguments": {"arguments": {"nargs": "*", "help": "after --: further arguments of SGLang's own command"}},
}
"""Options of a server that are not given as what they are: the flags, as ``argparse`` has them."""
_DOWNLOAD = "fetch a model that is not on this machine from the Hugging Face hub"
_PORT = 30_000


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """What is not given is left to ``ServerOptions`` or ``SGLangOptions``, which have the defaults."""
    own, real = (set(get_type_hints(kind)) - {*_OTHER_FLAGS} for kind in (ServerOptions, SGLangOptions))
    backends = ("embedded", "sglang")
    parser.add_argument("--backend", choices=backends, default="embedded", help="our own small server, or real SGLang")
    both = parser.add_argument_group("both backends")
    add_flags(both, ServerOptions, own & real)
    add_flags(parser.add_argument_group("embedded only"), ServerOptions, own - real)
    sglang = parser.add_argument_group("sglang only")
    add_flags(sglang, SGLangOptions, real - own)
    both.add_argument("--download", action="store_true", default=argparse.SUPPRESS, help=_DOWNLOAD)
    for name, flags in _OTHER_FLAGS.items():
        for flag, options in flags.items():
            (both if name == "api_key" else sglang).add_argument(flag, **{"default": argparse.SUPPRESS, **options})


def serve(backend: str, given: Mapping[str, Any], *, say: Callable[[str], None], until_signal: UntilSignal) -> None:
    """Serve until a signal; ``given``: the values of the flags that the user wrote.

    Raises ``ConfigError`` before anything starts, ``ServerUnavailable`` if SGLang ends.
    """
    options = {name: value for name, value in given.items() if value != []}
    download = options.pop("download", False)
    _refuse_others(backend, options)
    for name, key in (("api_key_env", "api_key"), ("admin_key_env", "admin_key")):
        if name in options:
            options[key] = read_secret(f"--{name.replace('_', '-')}", options.pop(name))
    if backend == "embedded":
        if download:
            _download(options["model"], say)
        say("loading torch and the model")
        from asyncrl.servers.serve import run_server

        run_server(ServerOptions(**options))
        return
    found = read_options(options)
    if download:
        _download(found.model, say)

    async def work() -> None:
        await _serve_sglang(found, say)

    anyio.run(until_signal, work, backend="asyncio")


def _download(model: Path, say: Callable[[str], None]) -> None:
    say(f"looking for {model}, and downloading what is missing of it, which can take minutes")
    find_model(model, download=True, key="--model")


def _refuse_others(backend: str, options: Mapping[str, Any]) -> None:
    """Refuse flags of the other backend."""
    fields = get_type_hints(ServerOptions if backend == "embedded" else SGLangOptions)
    known = {flag.strip("-").replace("-", "_") for name in fields for flag in _OTHER_FLAGS.get(name, {name: {}})}
    for name in options.keys() - known:
        flag = "arguments after --" if name == "arguments" else f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag}: is not an option of --backend {backend}")


def read_options(options: Mapping[str, Any]) -> SGLangOptions:
    """The options of a real server from those of the command line."""
    lists_as_tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    found: dict[str, Any] = {"port": _PORT, **lists_as_tuples}
    rank, modules = found.pop("lora_rank", None), found.pop("lora_modules", None)
    if rank is not None:
        found["lora"] = LoraConfig(r=rank, target_modules=modules or "all-linear")
    elif modules or "max_loras_per_batch" in found:
        raise ConfigError("--lora-modules and --max-loras-per-batch are about adapters, which need --lora-rank")
    return SGLangOptions(**found)


def flags_of(options: SGLangOptions) -> list[str]:
    """The flags that ``read_options`` reads as ``options``, but for its port and keys, which others say."""
    left = {*_OTHER_FLAGS, "port", *(() if options.lora else ("max_loras_per_batch",))}
    found: list[str] = []
    for field in fields(options):
        value, flag = getattr(options, field.name), "--" + field.name.replace("_", "-")
        if field.name in left or value == field.default:
            continue
        if isinstance(value, tuple):
            found += [flag, *value]
        else:
            found.append(flag if value is True else f"{flag}={value}")
    if options.lora is not None:
        found.append(f"--lora-rank={options.lora.r}")
        if options.lora.target_modules != "all-linear":
            found += ["--lora-modules", *options.lora.target_modules]
    return [*found, "--", *options.arguments] if options.arguments else found


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
