"""What the embedded server says about its speed."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import pytest

from asyncrl.sampling.replies import parse_load
from asyncrl.servers.embedded.throughput import Throughput
from tests.servers.embedded.calls import LONG, Call, Serving, body, load, post, until


@dataclass
class _Engine:
    sampled_tokens: int = 0


@pytest.mark.virtual_clock
@pytest.mark.parametrize("rate", [0.05, 10.0, 400.0])
async def test_a_steady_rate_is_told(rate: float) -> None:
    """From the first step on, and whatever the length of a step."""
    throughput, engine = Throughput(), _Engine()
    assert throughput.now == 0
    for tokens in (1, 20, 3):
        with throughput.measured(engine):
            await anyio.sleep(tokens / rate)
            engine.sampled_tokens += tokens
        await anyio.sleep(1000)  # nobody asks for anything
        assert throughput.now == pytest.approx(rate)


@pytest.mark.virtual_clock
async def test_a_step_that_hangs_is_seen() -> None:
    """The rate falls as long as it lasts."""
    throughput, engine = Throughput(), _Engine()
    with throughput.measured(engine):
        await anyio.sleep(1)
        engine.sampled_tokens += 100
    seen = []
    with throughput.measured(engine):
        for _ in range(5):
            await anyio.sleep(100)
            seen.append(throughput.now)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 1


async def test_a_load_has_the_rate_of_what_runs(serving: Serving) -> None:
    """Some tokens a second while a request runs, and none without one."""
    async with serving() as client, anyio.create_task_group() as tasks:
        assert parse_load({"loads": [await load(client)]}).tokens_per_second == 0
        tasks.start_soon(Call(client, body([5, 6, 7], rid="r", new=LONG)))
        found = await until(client, lambda seen: seen["gen_throughput"] > 0)
        assert found["num_running_reqs"] == 1
        await post(client, "/abort_request", rid="r")
