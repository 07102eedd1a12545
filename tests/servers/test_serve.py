"""Serving over HTTP: the ready line, the port, and how the process ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx
import orjson
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncrl.errors import ConfigError
from asyncrl.servers.serve import ServerOptions, _bind, run_server
from tests.modelfolder import write_model


def test_a_port_in_use_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """The folder has no weights, so loading it would be another error."""
    write_model(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port is {port}, but must be a port of 127.0.0.1 that is free"):
            run_server(ServerOptions(model=tmp_path, port=port))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_replies_are_not_held_back(host: str) -> None:
    """Connections say that they are TCP, without which asyncio leaves Nagle's 40 ms on."""
    with _bind(host, 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["stdin", "SIGTERM"])
async def test_the_process_serves_and_ends_in_order(tiny_model: Callable[..., Path], ended_by: str) -> None:
    """By the end of its input or a signal, with exit code 0; requests that still run do not hold it."""
    command = [sys.executable, "-m", "asyncrl", "serve", "--model", str(tiny_model()), "--port", "0"]
    async with await anyio.open_process([*command, "--exit-with-stdin"], stderr=None) as process:
        assert process.stdout is not None and process.stdin is not None
        line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 10_000)
        ready = orjson.loads(line)
        assert (ready["ready"], ready["pid"]) == (True, process.pid)
        async with httpx.AsyncClient(base_url=ready["url"], trust_env=False) as client:
            body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
            reply = await client.post("/generate", json=body)
            assert len(reply.json()["output_ids"]) == 3
        if ended_by == "stdin":
            await process.stdin.aclose()
        else:
            os.kill(process.pid, getattr(signal, ended_by))
        assert await process.wait() == 0


@pytest.mark.slow
def test_a_model_that_is_not_known_is_a_plain_configuration_error(tmp_path: Path) -> None:
    """So that the command ends with the exit code for bad options."""
    write_model(tmp_path, '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ConfigError, match="no forward pass for the architecture GPT2LMHeadModel"):
        run_server(ServerOptions(model=tmp_path, port=0))
