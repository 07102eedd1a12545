"""The embedded server as an ASGI application: SGLang's routes over a ``Service``."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from typing import Any

import anyio
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncrl.concurrency.worker import Worker
from asyncrl.servers.embedded.options import ServerOptions
from asyncrl.servers.wireroutes import WireRoutes
from asyncrl.servers.wireserver import WireError, parse_body, parse_generate

__all__ = ["create_app"]


def create_app(options: ServerOptions) -> Starlette:
    """The application. Its lifespan loads the model; in-process users enter ``app.router.lifespan_context(app)``."""
    server = _Server(options)
    return Starlette(
        lifespan=server.lifespan,
        exception_handlers={HTTPException: _refused},
        middleware=[Middleware(_BodyLimit, max_bytes=options.max_body_bytes)],
        routes=[Route("/{path:path}", server.handle, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])],
    )


class _Server:
    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._service: Any = None
        # A Service, which cannot be named here: torch is loaded with it, in the lifespan.
        self._routes: WireRoutes | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None, None]:
        """Load the model, and step while the server is up."""
        with closing(Worker("asyncrl-engine")) as worker:
            self._service, updates = await worker.run(_load, self._options, worker)
            self._routes = WireRoutes(self._service, updates, version="embedded-0.1")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._service.run)
                yield
                tasks.cancel_scope.cancel()

    async def handle(self, request: HTTPRequest) -> Response:
        """Check the key, and turn refusals into replies."""
        method = "GET" if request.method == "HEAD" else request.method
        route = request.scope["path"]
        key = self._options.api_key
        if key and route not in ("/health", "/ready"):
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                return _json({"error": "Unauthorized"}, 401)
        assert self._routes is not None
        try:
            if (method, route) == ("POST", "/generate"):
                return _json(await self._generate(request))
            body = parse_body(await request.body()) if method == "POST" else {}
            status, reply = await self._routes.answer(method, route, body)
        except WireError as error:
            return _json(error.body, error.status)
        except ClientDisconnect:
            # In the middle of its body; nobody reads this.
            return _json({"error": {"message": "the body ended too early"}}, 400)
        return Response(reply, status) if isinstance(reply, str) else _json(reply, status)

    async def _generate(self, request: HTTPRequest) -> dict[str, Any]:
        """Sample; a client that goes away aborts its request."""
        wire = parse_generate(await request.body())
        reply: dict[str, Any] = {}
        refusal: WireError | None = None

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                reply = await self._service.generate(wire)
            except WireError as error:
                # Raised outside of the group, which would wrap it.
                refusal = error
            tasks.cancel_scope.cancel()
        if refusal is not None:
            raise refusal
        return reply


async def _refused(request: HTTPRequest, error: Exception) -> Response:
    """Methods that are not there, and bodies that are too long."""
    assert isinstance(error, HTTPException)
    return _json({"detail": error.detail}, error.status_code)


def _load(options: ServerOptions, worker: Worker) -> Any:
    # Importing torch takes seconds, so that it happens in the worker too.
    from asyncrl.servers.embedded.loading import load_service

    return load_service(options, worker)


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


class _BodyLimit:
    """Refuses bodies of more than ``max_bytes``: before they are read if they say their length, else on the way."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._reason = f"the body is longer than {max_bytes} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            content = orjson.dumps({"error": {"message": self._reason}})
            await Response(content, status_code=413, media_type="application/json")(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, self._reason)
            return message

        await self._app(scope, counted, send)
