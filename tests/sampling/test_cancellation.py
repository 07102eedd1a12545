"""Whatever happens to a request, and whenever its caller is cancelled: nothing of it is left anywhere."""

from __future__ import annotations

import random
from contextlib import suppress

import anyio
import pytest

from asyncrl.errors import SamplingError
from asyncrl.testing.clock import run_virtual
from asyncrl.testing.server import Fault
from asyncrl.types import Segment
from tests.sampling.clients import OTHER, URL, make_request, open_client, pool_of, scripted

_FAULTS = (Fault(), Fault(), Fault(status=503), Fault(status=500), Fault(drop=True), Fault(lose=True), Fault(hold=True))


@pytest.mark.parametrize("seed", range(60))
def test_a_request_is_answered_or_aborted_and_leaves_nothing(seed: int) -> None:
    """Under faults, quarantines, removals and cancellation at any await."""
    rng = random.Random(seed)
    answered: list[Segment] = []

    async def main() -> None:
        servers = {url: scripted(seconds=lambda call: rng.uniform(0.0, 3.0)) for url in (URL, OTHER)}
        for server in servers.values():
            server.fault("/generate", *rng.choices(_FAULTS, k=20))

        async with open_client(servers, seed=seed) as sampler:

            async def ask(key: int) -> None:
                await anyio.sleep(rng.uniform(0.0, 3.0))
                with anyio.move_on_after(rng.choice((None, rng.uniform(0.0, 6.0)))):
                    with suppress(SamplingError):
                        answered.append(await sampler.sample(make_request(str(key))))

            async def disturb() -> None:
                await anyio.sleep(rng.uniform(0.0, 3.0))
                sampler.quarantine(URL, "test")
                await anyio.sleep(rng.uniform(0.0, 3.0))
                sampler.remove(URL, now=rng.random() < 0.5)
                await anyio.sleep(rng.uniform(0.0, 3.0))
                sampler.add(URL)
                await anyio.sleep(60)
                for server in servers.values():
                    server.release()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(disturb)
                for key in range(16):
                    tasks.start_soon(ask, key)
            await anyio.sleep(60)
            assert [pool_of(sampler).in_flight(url) for url in servers] == [0, 0]
            assert len(sampler.live) == 2
        assert [server.in_flight for server in servers.values()] == [0, 0]
        calls = {call.rid for server in servers.values() for call in server.generated}
        aborted = {rid for server in servers.values() for rid in server.aborted}
        # Each attempt that no caller has the answer of was aborted.
        assert len(calls - aborted) <= len(answered)

    run_virtual(main, seed=seed)
    assert answered
