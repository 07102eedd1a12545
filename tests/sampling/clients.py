"""Clients of scripted servers: what several files of tests start from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncrl.events import Event, Notice
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.pool import Pool, rendezvous
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.server import ScriptedServer, network

__all__ = ["OTHER", "THIRD", "URL", "key_of", "make_request", "open_client", "pool_of", "scripted", "watch"]

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
    """The books of an open client."""
    assert sampler._fleet is not None
    return sampler._fleet.pool
