"""A scripted SGLang server: the wire format without a model, for tests of everything that talks to one.

``ScriptedServer`` is an ASGI app. ``network({url: server})`` reaches it in-process, uvicorn serves it over sockets. Its
"model" is the number theta of the adapter or of the base weights (see ``asyncrl.testing.theta``). This file has what is
for tests alone: what goes wrong, and what happened; SGLang's rules are in ``scriptedengine``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import httpx

from asyncrl.concurrency.notifier import Notifier
from asyncrl.servers.routes import METHODS, Routes, encoded
from asyncrl.servers.wireserver import ServerLimits as ScriptedLimits
from asyncrl.servers.wireserver import WireError, parse_body, parse_generate
from asyncrl.testing.scriptedengine import ScriptedEngine
from asyncrl.testing.theta import find_theta_in

__all__ = ["Fault", "GenerateCall", "ScriptedLimits", "ScriptedServer", "network"]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_DRIP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A request for tokens as it arrived."""

    rid: str
    input_ids: tuple[int, ...]
    sampling_params: Mapping[str, Any]
    lora_path: str | None
    extra_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one call. Without any field set, nothing does."""

    status: int | None = None
    """Answer this status, and ``body``."""
    body: bytes = b'{"error":{"message":"scripted"}}'
    hold: bool = False
    """Do not answer until ``ScriptedServer.release`` or, for a request for tokens, its abort."""
    drip: bool = False
    """Begin the answer and never come to its end, a byte each minute, until ``ScriptedServer.release``."""
    drop: bool = False
    """Cut the connection after the answer began."""
    lose: bool = False
    """Do what was asked, then cut the connection."""
    ignore: bool = False
    """Answer as if it had been done, and do nothing."""
    edit: Callable[[dict[str, Any]], None] | None = None
    """Change the reply before it is sent."""


class _Cut(Exception):
    """The connection breaks."""


class ScriptedServer:
    """One server. Its public attributes are what happened; its methods make things happen.

    ``tokens(call)``: what is sampled, cut to ``max_new_tokens``; one that is a stop token ends it. None: drawn from the
    model. ``seconds(call)``: how long that takes on the loop's clock. ``eos``: ids that end requests too.
    ``ignores_adapters``: answer with the base weights. ``limits``: sizes; there are none by default.
    """

    def __init__(
        self,
        *,
        tokens: Callable[[GenerateCall], Sequence[int]] | None = None,
        seconds: Callable[[GenerateCall], float] = lambda call: 0.0,
        eos: Sequence[int] = (),
        ignores_adapters: bool = False,
        limits: ScriptedLimits | None = None,
    ) -> None:
        self._tokens = tokens
        self._seconds = seconds
        self._changed = Notifier()
        self._engine = ScriptedEngine(
            limits=limits or ScriptedLimits(),
            eos=frozenset(eos),
            ignores_adapters=ignores_adapters,
            changed=self._changed,
        )
        self._faults: dict[str, deque[Fault]] = {}
        self._releases = 0
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        """Route and body of every call."""
        self.authorizations: dict[str, str] = {}
        """The last ``Authorization`` header of each route."""
        self.generated: list[GenerateCall] = []
        """Requests for tokens, without probes."""
        self.probes: list[GenerateCall] = []
        self.aborted: list[str] = []
        """Every rid that somebody asked to abort."""
        self.peak_in_flight = 0
        self.limits: dict[str, int] = {}
        """More sizes that ``/server_info`` tells, such as ``max_req_input_len``."""
        self._routes = self._new_routes()
        self.down = False
        """In-process only: refuse connections."""

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return self._engine.in_flight

    @property
    def adapters(self) -> Mapping[str, Path]:
        """The loaded adapters."""
        return {name: Path(path) for name, path in self._engine.adapters.paths.items()}

    @adapters.setter
    def adapters(self, paths: Mapping[str, Path]) -> None:
        self._engine.adapters.hold({name: (str(path), find_theta_in(path) or 0.0) for name, path in paths.items()})

    @property
    def reloaded(self) -> Sequence[str]:
        """Adapters that came back because a late request named them after they were unloaded."""
        return self._engine.reloaded

    @property
    def paused(self) -> str | None:
        """The mode of the pause, None if there is none."""
        return self._engine.paused

    @property
    def weight_version(self) -> str:
        """The label of the base weights."""
        return self._routes.label

    @weight_version.setter
    def weight_version(self, label: str) -> None:
        self._engine.become(None, label)
        self._routes.rename(label)

    @property
    def base_theta(self) -> float:
        """The base weights."""
        return self._engine.theta

    @base_theta.setter
    def base_theta(self, theta: float) -> None:
        self._engine.become(theta, None)

    def fault(self, route: str, *faults: Fault) -> None:
        """Let the next calls of ``route`` go wrong in these ways, one call each."""
        self._faults.setdefault(route, deque()).extend(faults)

    def release(self) -> None:
        """Let every call go on that is held."""
        self._releases += 1
        self._engine.release()
        self._changed.notify()

    def restart(self) -> None:
        """Come back as a new process: nothing is loaded."""
        self._engine.forget()
        self._routes = self._new_routes()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``, about this server, holds."""
        await self._changed.wait_until(condition)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        assert scope["type"] == "http", "serve this app with lifespan='off'"
        method, route = scope["method"], scope["path"]
        content = await _read(receive)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.authorizations[route] = headers.get("authorization", "")
        queue = self._faults.get(route)
        fault = queue.popleft() if queue else Fault()
        try:
            status, reply = await self._answer(method, route, content, fault)
        except _Cut:
            await _start(send, 200, kind="application/json", length=1)
            # In-process the client's transport hands this through; over a socket the server closes the connection.
            raise httpx.ReadError("scripted: the connection was cut") from None
        finally:
            self._changed.notify()
        answer, kind = (reply, "application/json") if isinstance(reply, bytes) else encoded(reply)
        await _start(send, status, kind=kind, length=None if fault.drip else len(answer))
        if fault.drip:
            await self._drip(send)
        await send({"type": "http.response.body", "body": answer})

    async def _drip(self, send: Send) -> None:
        seen = self._releases
        while self._releases == seen:
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            with anyio.move_on_after(_DRIP_S):
                await self._changed.wait_until(lambda: self._releases > seen)

    async def _answer(self, method: str, route: str, content: bytes, fault: Fault) -> tuple[int, Any]:
        try:
            body = parse_body(content)
        except WireError as error:
            return error.status, error.body
        self.calls.append((route, body))
        self._changed.notify()
        if fault.drop:
            raise _Cut
        if fault.status is not None:
            return fault.status, fault.body
        if fault.hold and route != "/generate":
            seen = self._releases
            await self._changed.wait_until(lambda: self._releases > seen)
        status = 200
        reply: Any = {"success": True}
        try:
            if not fault.ignore:
                reply = await self._handle(method, route, body, fault)
        except WireError as error:
            status, reply = error.status, error.body
        if fault.edit is not None and status == 200:
            fault.edit(reply)
        if fault.lose and status == 200:
            raise _Cut
        return status, reply

    async def _handle(self, method: str, route: str, body: Mapping[str, Any], fault: Fault) -> Any:
        if route not in METHODS:
            raise WireError(404, {"detail": "Not Found"})
        if METHODS[route] != method:
            raise WireError(405, {"detail": "Method Not Allowed"})
        if route == "/generate":
            return await self._generate(body, held=fault.hold)
        if route == "/abort_request" and isinstance(body.get("rid"), str):
            self.aborted.append(body["rid"])
        return await self._routes.answer(route, body)

    def _new_routes(self) -> Routes:
        return Routes(self._engine, version="scripted", model_path="scripted", model_info={}, server_info=self.limits)

    async def _generate(self, body: Mapping[str, Any], *, held: bool) -> dict[str, Any]:
        wire = parse_generate(body)
        call = GenerateCall(
            rid=wire.rid,
            input_ids=tuple(wire.input_ids),
            sampling_params=body.get("sampling_params") or {},
            lora_path=wire.lora_path,
            extra_key=body.get("extra_key"),
        )
        (self.probes if "logprob_start_len" in body else self.generated).append(call)
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight + 1)
        script = None if self._tokens is None else self._tokens(call)
        return await self._engine.generate(wire, script, seconds=self._seconds(call), held=held)


class _Network(httpx.AsyncBaseTransport):
    def __init__(self, servers: Mapping[str, ScriptedServer]) -> None:
        self._servers = servers
        self._transports = {url: httpx.ASGITransport(server) for url, server in servers.items()}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = f"{request.url.scheme}://{request.url.netloc.decode()}"
        if self._servers[url].down:
            raise httpx.ConnectError("scripted: connection refused")
        return await self._transports[url].handle_async_request(request)


def network(servers: Mapping[str, ScriptedServer]) -> httpx.AsyncBaseTransport:
    """A transport that reaches each server under its URL without sockets."""
    return _Network(servers)


async def _read(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _start(send: Send, status: int, *, kind: str, length: int | None) -> None:
    headers = [(b"content-type", kind.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
