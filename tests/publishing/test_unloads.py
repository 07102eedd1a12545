"""A long run on servers that fail to unload, in every way: nothing piles up on them or on the disk."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.publishing.lora import DiskAdapters, LoraPublisher
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.server import Fault, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner

URL, OTHER = "http://one:30000", "http://two:30000"
PROBE = Probe(tokens=np.arange(4, dtype=np.int32))
VERSIONS = 100
EVERY_S = 20.0
# The two newest, and those that a call which hangs for a minute keeps waiting.
MOST = 2 + 5


UNLOAD = "/unload_lora_adapter"


def _folders(directory: Path) -> int:
    return len(list(directory.iterdir()))


def _denied(reply: dict[str, Any]) -> None:
    reply.update(success=False, error_message="busy")


async def _away(server: ScriptedServer) -> None:
    server.fault(UNLOAD, Fault(drop=True))
    server.down = True


async def _new_process(server: ScriptedServer) -> None:
    server.fault(UNLOAD, Fault(lose=True))
    server.restart()


async def _blind(server: ScriptedServer) -> None:
    server.fault(UNLOAD, Fault(lose=True))
    server.fault("/v1/models", Fault(status=500))


HARMS: dict[str, Sequence[Fault] | Callable[[ScriptedServer], Awaitable[None]]] = {
    "400": [Fault(status=400)],
    "404": [Fault(status=404)],
    "500": [Fault(status=500)],
    "four times": [Fault(status=503)] * 4,
    "nonsense": [Fault(status=200, body=b"nonsense")],
    "lost": [Fault(lose=True)],
    "cut": [Fault(drop=True)],
    "hang": [Fault(hold=True)],
    "ignored": [Fault(ignore=True)],
    "denied": [Fault(ignore=True, edit=_denied)],
    "away": _away,
    "new process": _new_process,
    "blind": _blind,
}


@pytest.mark.virtual_clock
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_a_hundred_versions_leave_nothing_behind(tmp_path: Path, seed: int) -> None:
    """Every seventh unload goes wrong on one of two servers, each time in another way."""
    servers = {URL: ScriptedServer(), OTHER: ScriptedServer()}
    learner = ThetaLearner()
    sampler = SGLang(list(servers), transport=network(servers))
    publisher = LoraPublisher(learner, sampler, DiskAdapters(learner, tmp_path), "run", probe=PROBE)
    harms = random.Random(seed).sample(sorted(HARMS), len(HARMS))
    async with sampler.opened():
        for version in range(VERSIONS):
            learner.theta = version / 10
            servers[URL].down = False
            if version % 7 == 5 and harms:
                harm = HARMS[harms.pop()]
                if callable(harm):
                    await harm(servers[URL])
                else:
                    servers[URL].fault(UNLOAD, *harm)
            await publisher.stage(version)
            await publisher.publish(version)
            await anyio.sleep(EVERY_S)
            assert all(len(server.adapters) <= MOST for server in servers.values())
            assert _folders(tmp_path) <= MOST
        assert not harms
        await anyio.sleep(200)
        for server in servers.values():
            assert len(server.adapters) == 2
            assert server.reloaded == []
        assert _folders(tmp_path) == 2
