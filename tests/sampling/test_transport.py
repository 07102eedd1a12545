"""The client over real sockets: many requests at once, bursts of cancellation, connections that servers close."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import numpy as np
import pytest
import uvicorn

from asyncrl.errors import ConfigError
from asyncrl.events import Notice
from asyncrl.sampling import transport
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.transport import require_open_files
from asyncrl.testing.server import Fault, ScriptedServer

pytestmark = pytest.mark.slow


@asynccontextmanager
async def _served(app: ScriptedServer) -> AsyncGenerator[tuple[SGLang, uvicorn.Server], None]:
    app.weight_version = "0"
    with socket.socket() as listener:
        # It listens before the server is up, so that nobody has to wait for that.
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            async with SGLang([url]).opened() as sampler:
                yield sampler, server
            server.should_exit = True


def _request(key: int) -> SegmentRequest:
    return SegmentRequest(
        trajectory_id=str(key), input_ids=np.array([key, 1], dtype=np.int32), max_new_tokens=4, version=0
    )


def _close_connections(server: uvicorn.Server) -> None:
    for connection in list(server.server_state.connections):
        assert connection.transport is not None
        connection.transport.close()


async def test_hundreds_of_cancelled_requests_leave_nothing_behind() -> None:
    """All are in flight, all are aborted on the server, and the connections after them are sound."""
    app = ScriptedServer()
    app.fault("/generate", *[Fault(hold=True)] * 300)
    async with _served(app) as (sampler, _):
        async with anyio.create_task_group() as tasks:
            for key in range(300):
                tasks.start_soon(sampler.sample, _request(key))
            await app.wait_until(lambda: app.in_flight == 300)
            tasks.cancel_scope.cancel()
        await app.wait_until(lambda: app.in_flight == 0)
        assert sorted(app.aborted) == sorted(call.rid for call in app.generated)
        for key in range(20):
            assert len((await sampler.sample(_request(key))).tokens) == 4
    assert len(app.generated) == 320


async def test_connections_that_the_server_closed_cost_no_request() -> None:
    """The client may write into one before it learns of that; the server is not blamed."""
    app = ScriptedServer()
    async with _served(app) as (sampler, server):
        sampler.events.subscribe(lambda event: pytest.fail(f"{event}"), kinds=(Notice,))
        for key in range(20):
            await sampler.sample(_request(key))
            _close_connections(server)
            await sampler.live[0].flush()
            _close_connections(server)
    assert len(app.generated) == 20


async def test_a_connection_that_breaks_while_the_request_runs_makes_the_server_suspect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever answers next may be another program, so it is looked at first."""
    monkeypatch.setattr(transport, "STALE_S", 0.0)
    app = ScriptedServer()
    app.fault("/generate", Fault(hold=True))
    names: list[str] = []
    async with _served(app) as (sampler, server), anyio.create_task_group() as tasks:
        sampler.events.subscribe(lambda event: names.append(event.name) if isinstance(event, Notice) else None)
        tasks.start_soon(sampler.sample, _request(1))
        await app.wait_until(lambda: app.in_flight == 1)
        for connection in list(server.server_state.connections):
            assert connection.transport is not None
            connection.transport.abort()
    assert names == ["server_returned"]


async def test_connections_are_opened_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of requests at once are all in flight soon, without a wall of connects."""
    connecting = most = 0
    connect = aiohttp.TCPConnector._create_direct_connection

    async def counted(connector: aiohttp.TCPConnector, *args: Any, **options: Any) -> Any:
        nonlocal connecting, most
        connecting += 1
        most = max(most, connecting)
        try:
            return await connect(connector, *args, **options)
        finally:
            connecting -= 1

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_direct_connection", counted)
    app = ScriptedServer()
    app.fault("/generate", *[Fault(hold=True)] * 500)
    async with _served(app) as (sampler, _), anyio.create_task_group() as tasks:
        for key in range(500):
            tasks.start_soon(sampler.sample, _request(key))
        await app.wait_until(lambda: app.in_flight == 500)
        app.release()
    assert 1 < most <= 128


async def test_a_connection_cut_within_the_answer_is_tried_again() -> None:
    """Half an answer is none: the request is sent anew, with another id."""
    app = ScriptedServer()
    app.fault("/generate", Fault(lose=True))
    async with _served(app) as (sampler, _):
        assert len((await sampler.sample(_request(1))).tokens) == 4
    first, second = app.generated
    assert first.rid != second.rid


def test_too_few_open_files_are_told_with_the_number_that_is_needed() -> None:
    """More requests than file descriptors would fail one by one much later."""
    require_open_files(1)
    with pytest.raises(ConfigError, match=re.escape("raise the limit to at least 1000000256")):
        require_open_files(10**9)
