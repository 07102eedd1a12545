"""The embedded server as an ASGI application: SGLang's routes over a ``Service``."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import orjson
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from asyncrl.errors import ConfigError
from asyncrl.learning.worker import Worker
from asyncrl.sampling.wireserver import WireError, bad_request, parse_generate
from asyncrl.scheduling.rules import require_count

__all__ = ["ServerOptions", "create_app"]

_VERSION = "embedded-0.1"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
Handler: TypeAlias = Callable[[HTTPRequest], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What is served, and where."""

    model: Path
    """Folder with a model of the Llama family and its tokenizer."""
    host: str = "127.0.0.1"
    """Anything but loopback needs ``api_key``."""
    port: int = 30_000
    """0: chosen by the system."""
    threads: int = 1
    dtype: str = "float32"
    context_length: int | None = None
    """None: the model's own."""
    max_running_requests: int = 128
    max_total_tokens: int | None = None
    """Tokens in the KV pool; None: a gigabyte, at most 65,536."""
    api_key: str | None = None
    exit_with_stdin: bool = False
    """End when standard input does."""
    random_seed: int = 0

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise ConfigError.for_value("--model", str(self.model), "a folder with a model (there is no config.json)")
        if self.host not in _LOOPBACK and not self.api_key:
            raise ConfigError.for_value(
                "--host", self.host, f"one of {', '.join(_LOOPBACK)}, or be used with an API key"
            )
        if not 0 <= self.port <= 65_535:
            raise ConfigError.for_value("--port", self.port, "between 0 and 65535")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError.for_value("--dtype", self.dtype, "float32, bfloat16 or float16")
        require_count("--threads", self.threads, least=1)
        require_count("--max-running-requests", self.max_running_requests, least=1)
        for key, value in (("context-length", self.context_length), ("max-total-tokens", self.max_total_tokens)):
            if value is not None:
                require_count(f"--{key}", value, least=2)


def create_app(options: ServerOptions) -> Starlette:
    """The application. Its lifespan loads the model; in-process users enter ``app.router.lifespan_context(app)``."""
    routes = _Routes(options)
    return Starlette(
        lifespan=routes.lifespan,
        routes=[
            *[Route(path, routes.guarded(handler), methods=["GET"]) for path, handler in routes.read.items()],
            *[Route(path, routes.guarded(handler), methods=["POST"]) for path, handler in routes.write.items()],
        ],
    )


class _Routes:
    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.service: Any = None
        # A Service, which cannot be named here: torch is loaded with it, in the lifespan.
        self.read: dict[str, Handler] = {
            "/health": self.health,
            "/ready": self.ready,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/v1/loads": self.loads,
            "/v1/models": self.models,
        }
        self.write: dict[str, Handler] = {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/flush_cache": self.flush_cache,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weight_version": self.update_weight_version,
            "/load_lora_adapter": self.load_lora_adapter,
            "/unload_lora_adapter": self.unload_lora_adapter,
        }

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None, None]:
        """Load the model, and step while the server is up."""
        with closing(Worker("asyncrl-engine")) as worker:
            self.service = await worker.run(_load, self._options, worker)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.service.run)
                yield
                tasks.cancel_scope.cancel()

    def guarded(self, handler: Handler) -> Handler:
        """Check the key, and turn refusals into replies."""
        open_routes = (self.health, self.ready)

        async def handle(request: HTTPRequest) -> Response:
            key = self._options.api_key
            if key and handler not in open_routes:
                given = request.headers.get("authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                    return _json({"error": "Unauthorized"}, 401)
            try:
                return await handler(request)
            except WireError as error:
                return _json(error.body, error.status)

        return handle

    async def generate(self, request: HTTPRequest) -> Response:
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
                reply = await self.service.generate(wire)
            except WireError as error:
                # Raised outside of the group, which would wrap it.
                refusal = error
            tasks.cancel_scope.cancel()
        if refusal is not None:
            raise refusal
        return _json(reply)

    async def abort_request(self, request: HTTPRequest) -> Response:
        """One request by rid, or all."""
        body = await _body(request)
        if body.get("abort_all"):
            await self.service.abort_all()
        elif body.get("rid"):
            await self.service.abort(str(body["rid"]))
        return Response()

    async def pause_generation(self, request: HTTPRequest) -> Response:
        """Modes abort, retract and in_place."""
        mode = (await _body(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise bad_request(f"mode is {mode!r}, not abort, retract or in_place")
        await self.service.pause(mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: HTTPRequest) -> Response:
        """Undo a pause."""
        self.service.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: HTTPRequest) -> Response:
        """Refused while something runs."""
        if await self.service.flush():
            return Response("Cache flushed.\n")
        return Response("Flush cache failed.\n", status_code=400)

    async def update_weights_from_disk(self, request: HTTPRequest) -> Response:
        """Full weights from a model folder."""
        body = await _body(request)
        label = body.get("weight_version")
        await self.service.update_weights(
            Path(_text(body, "model_path")),
            None if label is None else str(label),
            flush=body.get("flush_cache", True),
            abort_all=body.get("abort_all_requests", False),
        )
        message = "Succeeded to update model weights."
        if label is not None:
            message += f" Weight version updated to {label}."
        return _json({"success": True, "message": message, "num_paused_requests": 0})

    async def update_weight_version(self, request: HTTPRequest) -> Response:
        """The label alone."""
        body = await _body(request)
        label = _text(body, "new_version")
        if body.get("abort_all_requests", True):
            await self.service.abort_all()
        await self.service.relabel(label)
        return _json({"success": True, "message": f"Weight version updated to {label}", "new_version": label})

    async def load_lora_adapter(self, request: HTTPRequest) -> Response:
        """From a PEFT folder."""
        body = await _body(request)
        await self.service.load_adapter(_text(body, "lora_name"), _text(body, "lora_path"))
        return self._adapters()

    async def unload_lora_adapter(self, request: HTTPRequest) -> Response:
        """Waits for the requests that use it."""
        await self.service.unload_adapter(_text(await _body(request), "lora_name"))
        return self._adapters()

    async def health(self, request: HTTPRequest) -> Response:
        """The process answers."""
        return Response()

    async def ready(self, request: HTTPRequest) -> Response:
        """Up and not paused."""
        return Response(status_code=503 if self.service.paused else 200)

    async def model_info(self, request: HTTPRequest) -> Response:
        """What is served."""
        path = str(self.service.model_path)
        config = self.service.engine.model.config
        return _json(
            {
                "model_path": path,
                "served_model_name": path,
                "tokenizer_path": str(self._options.model),
                "is_generation": True,
                "weight_version": self.service.engine.label,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def server_info(self, request: HTTPRequest) -> Response:
        """Version and sizes."""
        return _json(
            {
                "version": _VERSION,
                "frontend": "python",
                "status": "ready",
                "weight_version": self.service.engine.label,
                "max_total_num_tokens": self.service.engine.model.slots,
            }
        )

    async def loads(self, request: HTTPRequest) -> Response:
        """Running and waiting requests, and what the KV pool holds."""
        running, waiting = self.service.load
        cache = self.service.engine.cache
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_used_tokens": cache.slots - cache.free,
            "max_total_num_tokens": cache.slots,
        }
        return _json({"timestamp": time.time(), "version": _VERSION, "num_accelerators": 1, "loads": [load]})

    async def models(self, request: HTTPRequest) -> Response:
        """The base model and its adapters."""
        base = str(self.service.model_path)
        entries = [{"id": base, "object": "model", "root": base, "parent": None}]
        entries += [
            {"id": name, "object": "model", "root": path, "parent": base}
            for name, path in self.service.loaded_adapters().items()
        ]
        return _json({"object": "list", "data": entries})

    def _adapters(self) -> Response:
        return _json({"success": True, "error_message": "", "loaded_adapters": self.service.loaded_adapters()})


def _load(options: ServerOptions, worker: Worker) -> Any:
    # Importing torch takes seconds, so that it happens in the worker too.
    from asyncrl.sampling.embedded.loading import load_service

    return load_service(options, worker)


async def _body(request: HTTPRequest) -> dict[str, Any]:
    content = await request.body()
    try:
        body = orjson.loads(content) if content else {}
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body must be an object")
    return body


def _text(body: Mapping[str, object], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{key} must be a string, got {value!r}")
    return value


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
