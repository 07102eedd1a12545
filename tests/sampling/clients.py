"""Clients of scripted servers: what several files of tests start from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.events import Event, Notice
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.pool import Pool, rendezvous
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.server import ScriptedServer, network

__all__ = [
    "CONTROL_CALLS",
    "OTHER",
    "THIRD",
    "URL",
    "key_of",
    "make_request",
    "open_client",
    "pool_of",
    "scripted",
    "watch",
]

URL, OTHER, THIRD = "http://one:30000", "http://two:30000", "http://three:30000"


def make_request(key: str, **changes: Any) -> SegmentRequest:
    """A request of trajectory ``key``."""
    options: dict[str, Any] = {"max_new_tokens": 4, "version": 0, "extra_key": "v0"}
    ids = np.array(changes.pop("ids", (1, 2, 3)), dtype=np.int32)
    return SegmentRequest(trajectory_id=key, input_ids=ids, **options | changes)


def scripted(**options: Any) -> ScriptedServer:
    """A server with base weights of version 0."""
    server = ScriptedServer(**options)
    server.weight_version = "0"
    return server


@asynccontextmanager
async def open_client(servers: Mapping[str, ScriptedServer], **options: Any) -> AsyncGenerator[SGLang, None]:
    """A client of ``servers``, or of those in ``urls``."""
    urls = options.pop("urls", list(servers))
    async with SGLang(urls, transport=network(servers), **options).opened() as sampler:
        yield sampler


def key_of(url: str, *urls: str) -> str:
    """A trajectory that sticks to ``url`` of ``urls``."""
    return next(str(key) for key in range(100) if rendezvous(str(key), urls) == url)


def watch(sampler: SGLang) -> list[str]:
    """The names of all notices from now on."""
    names: list[str] = []

    def note(event: Event) -> None:
        assert isinstance(event, Notice)
        names.append(event.name)

    sampler.events.subscribe(note, kinds=(Notice,))
    return names


def pool_of(sampler: SGLang) -> Pool:
    """The state of an open client."""
    return sampler.pool


CONTROL_CALLS: dict[str, tuple[str, Callable[[ServerControl], Coroutine[Any, Any, object]]]] = {
    "model info": ("/model_info", lambda server: server.model_info()),
    "server info": ("/server_info", lambda server: server.server_info()),
    "load": ("/v1/loads", lambda server: server.load()),
    "adapters": ("/v1/models", lambda server: server.adapters()),
    "load an adapter": ("/load_lora_adapter", lambda server: server.load_adapter("a", Path("x"))),
    "unload an adapter": ("/unload_lora_adapter", lambda server: server.unload_adapter("a")),
    "adapter tensors": (
        "/load_lora_adapter_from_tensors",
        lambda server: server.load_adapter_tensors("a", {}, ["eA=="]),
    ),
    "update from disk": ("/update_weights_from_disk", lambda server: server.update_from_disk(Path("x"), "1")),
    "begin": ("/begin_weight_update", lambda server: server.begin_update()),
    "end": ("/end_weight_update", lambda server: server.end_update()),
    "tensors": ("/update_weights_from_tensor", lambda server: server.update_from_tensors(["eA=="], "1")),
    "leave": ("/destroy_weights_update_group", lambda server: server.leave_group("g")),
    "join": (
        "/init_weights_update_group",
        lambda server: server.join_group(name="g", address="h", port=1, first_rank=1, world_size=2, backend="gloo"),
    ),
    "broadcast": (
        "/update_weights_from_distributed",
        lambda server: server.update_from_group("g", names=["n"], dtypes=["float32"], shapes=[[1]], label="1"),
    ),
    "checksum": ("/weights_checker", lambda server: server.checksum()),
    "pause": ("/pause_generation", lambda server: server.pause("retract")),
    "continue": ("/continue_generation", lambda server: server.continue_()),
    "flush": ("/flush_cache", lambda server: server.flush()),
    "score": ("/generate", lambda server: server.score(np.array([1, 2]), start=1, adapter=None, extra_key="")),
}
"""Name -> route of a control call, and the call."""
