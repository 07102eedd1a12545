"""HTTP as the sampling client needs it: thousands of long requests at once, cancelled at any moment.

Owns the connection settings. Leaves out retries, routing and the wire format.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import anyio
import httpx
from aiohttp import hdrs
from httpx_aiohttp import AiohttpTransport
from httpx_aiohttp.transport import map_aiohttp_exceptions

from asyncrl.errors import ConfigError

__all__ = ["STALE_S", "TRANSPORT_ERRORS", "Answer", "Client", "open_client", "require_open_files", "was_stale"]

TRANSPORT_ERRORS = (httpx.TransportError, httpx.DecodingError, aiohttp.ClientError)
"""The request or its answer was lost. A few of aiohttp's errors come through the bridge as they are."""

_KEEP_ALIVE_S = 4
# Servers close an idle connection after 5 s; a client that gives up first never writes into a closed one.
_CONNECT_S = 10
STALE_S = 1.0
"""A connection that breaks this soon after a request was written had been idle."""
_TCP_IDLE_S = 30
# Routers and address translators forget a silent connection after minutes, and a paused server is silent.
_OTHER_FILES = 256
_CONNECTS = 128
# At once to one server; well below every usual backlog, and a round trip each.
_TIMEOUT = httpx.Timeout(None, connect=_CONNECT_S)
_EXTENSIONS = {"timeout": _TIMEOUT.as_dict()}
_SESSION_TIMEOUT = aiohttp.ClientTimeout(sock_connect=_CONNECT_S)


class Answer(NamedTuple):
    """What came back for a request."""

    status: int
    content: bytes
    """All of the body, uncompressed."""


class Client(httpx.AsyncClient):
    """An ``httpx.AsyncClient`` with a short way for the requests of which there are thousands."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        super().__init__(transport=transport, timeout=_TIMEOUT, trust_env=False)
        self._direct = transport

    async def submit(self, url: str, content: bytes, headers: Mapping[str, str]) -> Answer:
        """POST without what a client does beside: no cookies, redirects, authentication or merging of headers."""
        if isinstance(self._direct, _Transport):
            return await self._direct.post(url, content, headers)
        request = httpx.Request("POST", url, content=content, headers=headers, extensions=_EXTENSIONS)
        response = await self._direct.handle_async_request(request)
        try:
            return Answer(response.status_code, await response.aread())
        finally:
            await response.aclose()


class _Transport(AiohttpTransport):
    """``AiohttpTransport`` with a way around httpx's requests and responses, which are a sixth of a segment's CPU."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        super().__init__(client=session, trust_env=False)
        self._session = session

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> Answer:
        """What ``handle_async_request`` does, with the same errors."""
        try:
            async with self._session.post(
                url,
                data=content,
                headers=headers,
                timeout=_SESSION_TIMEOUT,
                allow_redirects=False,
                auto_decompress=False,
            ) as response:
                body = await response.read()
        except Exception:
            with map_aiohttp_exceptions():
                raise
        if hdrs.CONTENT_ENCODING in response.headers:
            body = httpx.Response(response.status, headers=response.raw_headers, content=body).content
        return Answer(response.status, body)


@asynccontextmanager
async def open_client(transport: httpx.AsyncBaseTransport | None = None) -> AsyncGenerator[Client, None]:
    """A client without limits on connections and without a read timeout: whoever waits brings a cancel scope.

    ``transport`` replaces the network, for example ``httpx.ASGITransport(app)``.
    """
    if transport is None:
        # Plain httpx spends many times the CPU at hundreds of requests in flight, and its pool does not survive
        # bursts of cancellation. The session is ours because the transport's own stops at 100 connections.
        connector = _RampedConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_socket)
        session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
        transport = _Transport(session)
    async with Client(transport) as client:
        yield client


class _RampedConnector(aiohttp.TCPConnector):
    """Opens few connections to one server at a time: a wall of them overflows its backlog, and some would be refused.

    Only connecting waits here; requests on open connections do not.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._gates: dict[tuple[str | None, int | None], anyio.Semaphore] = {}

    async def _create_connection(self, req: aiohttp.ClientRequest, traces: Any, timeout: Any) -> Any:
        place = (req.url.host, req.url.port)
        async with self._gates.setdefault(place, anyio.Semaphore(_CONNECTS)):
            return await super()._create_connection(req, traces, timeout)


def was_stale(error: BaseException, *, since: float) -> bool:
    """True if a request of the time ``since`` met an idle connection that the server had just closed: ask again.

    It broke at once and before the first byte of an answer. One that breaks later was in use, and whatever answers next
    may be another program.
    """
    if anyio.current_time() > since + STALE_S:
        return False
    cause = error.__cause__
    if isinstance(cause, aiohttp.ClientConnectorError):
        return False
    return isinstance(
        cause, aiohttp.ServerDisconnectedError | aiohttp.ClientConnectionResetError | aiohttp.ClientOSError
    )


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
