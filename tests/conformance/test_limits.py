"""Many requests, idle connections, and what the server says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from tests.conformance.subject import LONG, Subject, outputs


@pytest.mark.slow
async def test_more_requests_than_can_run_are_all_answered(subject: Subject) -> None:
    """The rest waits in the queue, in order, and is seen there."""
    most = subject.served.max_running_requests
    async with anyio.create_task_group() as tasks:
        calls = [subject.call([5, 6, 7 + number], rid=f"r{number}", new=LONG) for number in range(most + 4)]
        for call in calls:
            tasks.start_soon(call)
        await subject.until_running(most, waiting=4)
        for number in range(most + 4):
            await subject.post("/abort_request", {"rid": f"r{number}"})
    assert all(call.meta["finish_reason"]["type"] == "abort" for call in calls)


@pytest.mark.slow
async def test_two_hundred_requests_at_once_are_all_answered(subject: Subject) -> None:
    """Each with its own tokens."""
    calls = [subject.call([5, 6, 7 + number % 32], new=4) for number in range(200)]
    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(call)
    assert all(len(outputs(call.reply)) == 4 for call in calls)
    assert len({call.meta["id"] for call in calls}) == 200


@pytest.mark.slow
async def test_an_idle_connection_is_closed_after_five_seconds(subject: Subject) -> None:
    """Which is why clients give theirs up sooner."""
    place = urlsplit(subject.served.url)
    async with await anyio.connect_tcp(str(place.hostname), int(place.port or 0)) as connection:
        await connection.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await connection.receive()).startswith(b"HTTP/1.1 200")
        begun = anyio.current_time()
        with pytest.raises(anyio.EndOfStream), anyio.fail_after(10):
            while True:
                await connection.receive()
        assert 4 < anyio.current_time() - begun < 8


async def test_a_server_tells_its_sizes(subject: Subject) -> None:
    """Those that budgets and admission are made from."""
    served = subject.served
    info = await subject.get("/server_info")
    assert info["version"] and info["weight_version"] == "default"
    assert (info["tp_size"], info["dp_size"], info["frontend"], info["status"]) == (1, 1, "python", "ready")
    assert info["max_total_num_tokens"] == served.max_total_tokens
    assert info["max_running_requests"] == served.max_running_requests
    assert info["max_req_input_len"] == served.context_length - 6


async def test_a_server_tells_its_model(subject: Subject) -> None:
    """Path and label."""
    info = await subject.get("/model_info")
    assert info["model_path"] == str(subject.served.weights[0])
    assert (info["weight_version"], info["is_generation"]) == ("default", True)


async def test_a_server_tells_its_load(subject: Subject) -> None:
    """What runs and waits, and how full its memory is."""
    load: Mapping[str, Any] = (await subject.get("/v1/loads"))["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    assert load["max_total_num_tokens"] == subject.served.max_total_tokens
    assert load["max_running_requests"] == subject.served.max_running_requests
    assert 0 <= load["token_usage"] < 1
    assert load["gen_throughput"] >= 0


async def test_models_are_the_base_and_its_adapters(subject: Subject) -> None:
    """An adapter has the base as its parent, and its path as its root."""
    await subject.load("one")
    base, adapter = (await subject.get("/v1/models"))["data"]
    assert (base["parent"], base["max_model_len"]) == (None, subject.served.context_length)
    assert adapter["id"] == "one"
    assert (adapter["parent"], adapter["root"]) == (base["id"], str(subject.served.adapters[0]))
