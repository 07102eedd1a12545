"""HTTP as the sampling client needs it: thousands of long requests at once, cancelled at any moment.

Owns the connection settings. Leaves out retries, routing and the wire format.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from asyncrl.errors import ConfigError

__all__ = ["TRANSPORT_ERRORS", "open_client", "require_open_files", "unanswered"]

TRANSPORT_ERRORS = (httpx.TransportError, aiohttp.ClientError)
"""The request or its answer was lost. A few of aiohttp's errors come through the bridge as they are."""

_KEEP_ALIVE_S = 4
# Servers close an idle connection after 5 s; a client that gives up first never writes into a closed one.
_CONNECT_S = 10
_TCP_IDLE_S = 30
# Routers and address translators forget a silent connection after minutes, and a paused server is silent.
_OTHER_FILES = 256


@asynccontextmanager
async def open_client(transport: httpx.AsyncBaseTransport | None = None) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client without limits on connections and without a read timeout: whoever waits brings a cancel scope.

    ``transport`` replaces the network, for example ``httpx.ASGITransport(app)``.
    """
    if transport is None:
        # Plain httpx spends many times the CPU at hundreds of requests in flight, and its pool does not survive
        # bursts of cancellation. The session is ours because the transport's own stops at 100 connections.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_socket)
        session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
        transport = AiohttpTransport(client=session, trust_env=False)
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    async with httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as client:
        yield client


def unanswered(error: BaseException) -> bool:
    """True if a connection that was open broke before the first byte of an answer: asking again is safe."""
    cause = error.__cause__
    if isinstance(cause, aiohttp.ClientConnectorError):
        return False
    return isinstance(cause, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)


def require_open_files(requests: int) -> None:
    """Raise ``ConfigError`` if the process may not hold ``requests`` connections open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < requests + _OTHER_FILES:
        raise ConfigError(
            f"schedule.max_sample_requests is {requests}, but this process may open only {soft} files: "
            f"raise the limit to at least {requests + _OTHER_FILES} (ulimit -n) or ask for fewer requests"
        )


def _socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _TCP_IDLE_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _TCP_IDLE_S)
    return made
