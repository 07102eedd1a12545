"""The embedded server as an ASGI application: its key, its limit, its lifespan, and the routes of ``Routes``."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, closing
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from asyncrl.concurrency.worker import Worker
from asyncrl.servers.embedded.options import ServerOptions
from asyncrl.servers.routes import METHODS, Routes, encoded
from asyncrl.servers.wireserver import WireError, parse_body, parse_generate

__all__ = ["create_app"]

_VERSION = "embedded-0.1"
_OPEN_ROUTES = ("/health", "/ready")


def create_app(options: ServerOptions) -> Starlette:
    """The application. Its lifespan loads the model; in-process users enter ``app.router.lifespan_context(app)``."""
    server = _EmbeddedApp(options)
    return Starlette(
        lifespan=server.lifespan,
        exception_handlers={HTTPException: _unknown},
        routes=[Route(path, server.answer, methods=[method]) for path, method in METHODS.items()],
    )


class _EmbeddedApp:
    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._service: Any = None
        # A Service, which cannot be named here: torch is loaded with it, in the lifespan.
        self._routes: Any = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None, None]:
        """Load the model, and step while the server is up."""
        with closing(Worker("asyncrl-engine")) as worker:
            self._service = await worker.run(_load, self._options, worker)
            config = self._service.engine.model.config
            self._routes = Routes(
                self._service,
                version=_VERSION,
                model_path=str(self._options.model),
                model_info={"model_type": config.model_type, "architectures": config.architectures},
                server_info={},
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._service.run)
                yield
                tasks.cancel_scope.cancel()

    async def answer(self, request: Request) -> Response:
        """Check the key, and turn refusals into replies."""
        route = request.scope["path"]
        try:
            if route not in _OPEN_ROUTES:
                self._require_key(request)
            body = parse_body(await self._read(request))
            if route == "/generate":
                return _response(await self._generate(request, body))
            return _response(await self._routes.answer(route, body))
        except WireError as error:
            return _response(error.body, error.status)
        except ClientDisconnect:
            # In the middle of its body; nobody reads this.
            return _response({"error": {"message": "the body ended too early"}}, 400)

    def _require_key(self, request: Request) -> None:
        key, given = self._options.api_key, request.headers.get("authorization", "")
        if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise WireError(401, {"error": "Unauthorized"})

    async def _read(self, request: Request) -> bytes:
        """The body; one that is too long is refused before it is read if it says its length, else on the way."""
        most = self._options.max_body_bytes
        refusal = WireError(413, {"error": {"message": f"the body is longer than {most} bytes"}})
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > most:
            raise refusal
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > most:
                raise refusal
        return bytes(content)

    async def _generate(self, request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
        """Sample; a client that goes away aborts its request."""
        wire = parse_generate(body)
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


async def _unknown(request: Request, error: Exception) -> Response:
    """Routes and methods that are not there."""
    assert isinstance(error, HTTPException)
    return _response({"detail": error.detail}, error.status_code)


def _load(options: ServerOptions, worker: Worker) -> Any:
    # Importing torch takes seconds, so that it happens in the worker too.
    from asyncrl.servers.embedded.loading import load_service

    return load_service(options, worker)


def _response(reply: Any, status: int = 200) -> Response:
    content, media_type = encoded(reply)
    return Response(content, status_code=status, media_type=media_type)
