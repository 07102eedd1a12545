"""Bytes that are no answer, over real sockets: cut, chunked, compressed or wrongly framed, of any route."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import numpy as np
import orjson
import pytest

from asyncrl.errors import SamplingError
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang, Timeouts

pytestmark = pytest.mark.slow

_META = {
    "finish_reason": {"type": "length", "length": 1},
    "completion_tokens": 1,
    "weight_version": "0",
    "weight_versions": [{"version": "0", "start": 0, "end": 1}],
    "output_token_logprobs": [[-0.5, 3, None]],
}
_BODY = orjson.dumps({"output_ids": [3], "meta_info": _META})
_HALF = _BODY[: len(_BODY) // 2]


def _reply(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def _chunks(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


_LENGTH = f"Content-Length: {len(_BODY)}"
_CHUNKED = "Transfer-Encoding: chunked"
_RIGHT = {
    "with its length": _reply(_BODY, _LENGTH),
    "until the end": _reply(_BODY),
    "in chunks": _reply(_chunks(_HALF, _BODY[len(_HALF) :]), _CHUNKED),
    "byte by byte": _reply(_chunks(*(bytes([byte]) for byte in _BODY)), _CHUNKED),
    "compressed": _reply(gzip.compress(_BODY), "Content-Encoding: gzip"),
    "deflated": _reply(zlib.compress(_BODY), "Content-Encoding: deflate"),
    "after a note to go on": b"HTTP/1.1 100 Continue\r\n\r\n" + _reply(_BODY, _LENGTH),
}
_WRONG = {
    "nothing": b"",
    "no HTTP": b"\x00\xff\x16\x03\x01 hello",
    "another protocol": b"HTTP/0.9 200\r\n\r\n",
    "half a status": b"HTTP/1.1 2",
    "no end of headers": b"HTTP/1.1 200 OK\r\nA: b\r\n",
    "a header without end": b"HTTP/1.1 200 OK\r\nA: " + b"x" * 300_000,
    "cut": _reply(_HALF, _LENGTH),
    "cut without a length": _reply(_HALF),
    "a negative length": _reply(_BODY, "Content-Length: -5"),
    "a length in words": _reply(_BODY, "Content-Length: many"),
    "two lengths": _reply(_BODY, _LENGTH, "Content-Length: 3"),
    "a chunk cut": _reply(_chunks(_HALF, end=b"ff\r\nabc"), _CHUNKED),
    "no last chunk": _reply(_chunks(_BODY, end=b""), _CHUNKED),
    "a chunk of no size": _reply(b"zz\r\nabc\r\n", _CHUNKED),
    "a chunk of any size": _reply(b"ffffffffffffffffffff\r\nabc\r\n", _CHUNKED),
    "no gzip": _reply(_BODY, "Content-Encoding: gzip"),
    "half a gzip": _reply(gzip.compress(_BODY)[:-12], "Content-Encoding: gzip"),
    "an empty answer": _reply(b"", "Content-Length: 0"),
    "no content": _reply(b"", status="204 No Content"),
    "not changed": _reply(b"", status="304 Not Modified"),
    "elsewhere": _reply(b"", "Location: http://127.0.0.1:1/", "Content-Length: 0", status="302 Found"),
    "a strange status": _reply(_BODY, _LENGTH, status="999 What"),
    "another alphabet": _reply(_BODY.decode().encode("utf-16"), "Content-Type: application/json; charset=utf-16"),
}


@asynccontextmanager
async def _serving(raw: list[bytes], *, route: bytes) -> AsyncGenerator[str, None]:
    """The URL of a server that answers ``route`` with what is in ``raw``, one each, and everything else rightly."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            received = b""
            try:
                while b"\r\n\r\n" not in received:
                    received += await stream.receive()
                asked = received.split(b" ")[1]
                content = (
                    b'{"version":"scripted","weight_version":"0","loads":[{"num_running_reqs":0,"num_waiting_reqs":0}]}'
                )
                right = _reply(content, f"Content-Length: {len(content)}")
                await stream.send(raw.pop(0) if asked == route and raw else right)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        try:
            yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        finally:
            tasks.cancel_scope.cancel()


def _request() -> SegmentRequest:
    return SegmentRequest(trajectory_id="t", input_ids=np.array([1, 2], dtype=np.int32), max_new_tokens=1, version=0)


@pytest.mark.parametrize("name", sorted(_RIGHT))
async def test_a_right_answer_is_read_however_it_travels(name: str) -> None:
    """In one piece, in many, or compressed by something on the way."""
    async with _serving([_RIGHT[name]], route=b"/generate") as url, SGLang([url], retries=0).opened() as sampler:
        assert (await sampler.sample(_request())).tokens.tolist() == [3]


@pytest.mark.parametrize("name", sorted(_WRONG))
async def test_what_is_no_answer_is_a_sampling_error(name: str) -> None:
    """Nothing of it is trained, and nobody but the server is blamed."""
    raw = [_WRONG[name]] * 2
    async with _serving(raw, route=b"/generate") as url, SGLang([url], retries=0).opened() as sampler:
        with pytest.raises(SamplingError, match=r"127\.0\.0\.1"):
            await sampler.sample(_request())


@pytest.mark.parametrize("route", ["/v1/loads", "/model_info", "/v1/models"])
async def test_what_is_no_answer_of_a_control_route_is_a_sampling_error(route: str) -> None:
    """Each of them, one after the other on one client."""
    raw: list[bytes] = []
    timeouts = Timeouts(publication_s=5.0)
    async with _serving(raw, route=route.encode()) as url, SGLang([url], timeouts=timeouts).opened() as sampler:
        server = sampler.live[0]
        calls = {"/v1/loads": server.load, "/model_info": server.model_info, "/v1/models": server.adapters}
        for name, reply in _WRONG.items():
            raw[:] = [reply] * 4  # some are asked for again
            with pytest.raises(SamplingError, match=r"127\.0\.0\.1"):
                await calls[route]()
                pytest.fail(name)
