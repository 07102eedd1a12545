"""The embedded server as an ASGI application: SGLang's routes over a ``Service``."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeAlias

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
from asyncrl.servers.wireserver import (
    WireError,
    adapter_error,
    adapters_reply,
    bad_request,
    field,
    longest_prompt,
    parse_body,
    parse_generate,
    update_error,
)

__all__ = ["create_app"]

_VERSION = "embedded-0.1"
Handler: TypeAlias = Callable[[HTTPRequest], Awaitable[Response]]


def create_app(options: ServerOptions) -> Starlette:
    """The application. Its lifespan loads the model; in-process users enter ``app.router.lifespan_context(app)``."""
    routes = _Routes(options)
    return Starlette(
        lifespan=routes.lifespan,
        exception_handlers={HTTPException: _unknown},
        middleware=[Middleware(_BodyLimit, max_bytes=options.max_body_bytes)],
        routes=[
            *[Route(path, routes.guarded(handler), methods=["GET"]) for path, handler in routes.read.items()],
            *[Route(path, routes.guarded(handler), methods=["POST"]) for path, handler in routes.write.items()],
        ],
    )


class _Routes:
    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.service: Any = None
        self.updates: Any = None
        # A Service and WeightUpdates, which cannot be named here: torch is loaded with them, in the lifespan.
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
            "/begin_weight_update": self.begin_weight_update,
            "/end_weight_update": self.end_weight_update,
            "/update_weights_from_tensor": self.update_weights_from_tensor,
            "/update_weights_from_distributed": self.update_weights_from_distributed,
            "/init_weights_update_group": self.init_weights_update_group,
            "/destroy_weights_update_group": self.destroy_weights_update_group,
            "/weights_checker": self.weights_checker,
            "/load_lora_adapter": self.load_lora_adapter,
            "/load_lora_adapter_from_tensors": self.load_lora_adapter_from_tensors,
            "/unload_lora_adapter": self.unload_lora_adapter,
        }

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None, None]:
        """Load the model, and step while the server is up."""
        with closing(Worker("asyncrl-engine")) as worker:
            self.service, self.updates = await worker.run(_load, self._options, worker)
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
            except ClientDisconnect:
                # In the middle of its body; nobody reads this.
                return _json({"error": {"message": "the body ended too early"}}, 400)

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
        body = parse_body(await request.body())
        rid = field(body, "rid", str)
        if field(body, "abort_all", bool, False):
            await self.service.abort_all()
        elif rid:
            await self.service.abort(rid)
        return Response()

    async def pause_generation(self, request: HTTPRequest) -> Response:
        """Modes abort, retract and in_place."""
        mode = field(parse_body(await request.body()), "mode", str, "abort")
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
        body = parse_body(await request.body())
        label = field(body, "weight_version", str)
        await self.service.update_weights(
            Path(field(body, "model_path", str, ...)),
            label,
            flush=field(body, "flush_cache", bool, True),
            abort_all=field(body, "abort_all_requests", bool, False),
        )
        return _updated("Succeeded to update model weights.", label, num_paused_requests=0)

    async def begin_weight_update(self, request: HTTPRequest) -> Response:
        """Open the session that broadcasts need."""
        await self.updates.begin()
        return _updated("Success")

    async def end_weight_update(self, request: HTTPRequest) -> Response:
        """Close it."""
        await self.updates.end()
        return _updated("Success")

    async def update_weights_from_tensor(self, request: HTTPRequest) -> Response:
        """Refused: see ``updates``."""
        field(parse_body(await request.body()), "serialized_named_tensors", list, ...)
        self.updates.refuse_tensors()
        raise AssertionError("it raises")

    async def update_weights_from_distributed(self, request: HTTPRequest) -> Response:
        """Some weights, by broadcast."""
        body = parse_body(await request.body())
        await self.updates.receive(body)
        return _updated("Succeeded to update parameter online.", body.get("weight_version"))

    async def init_weights_update_group(self, request: HTTPRequest) -> Response:
        """Join a group."""
        await self.updates.join(parse_body(await request.body()))
        return _updated("Succeeded to initialize custom process group.")

    async def destroy_weights_update_group(self, request: HTTPRequest) -> Response:
        """Leave it."""
        self.updates.leave(field(parse_body(await request.body()), "group_name", str, "weight_update_group"))
        return _updated("Succeeded to destroy custom process group.")

    async def update_weight_version(self, request: HTTPRequest) -> Response:
        """The label alone."""
        body = parse_body(await request.body())
        label = field(body, "new_version", str, ...)
        if field(body, "abort_all_requests", bool, True):
            await self.service.abort_all()
        await self.service.relabel(label)
        return _json({"success": True, "message": f"Weight version updated to {label}", "new_version": label})

    async def weights_checker(self, request: HTTPRequest) -> Response:
        """Digests of the weights; nothing else that SGLang's can do."""
        action = field(parse_body(await request.body()), "action", str, "checksum")
        if action != "checksum":
            raise update_error(f"Unsupported action={action!r}")
        sums = await self.service.checksums()
        whole = hashlib.sha256("".join(sums.values()).encode()).hexdigest()[:16]
        rank = {"checksums": sums, "per_gpu_checksum": whole}
        return _json({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole})

    async def load_lora_adapter(self, request: HTTPRequest) -> Response:
        """From a PEFT folder."""
        body = parse_body(await request.body())
        await self.service.load_adapter(field(body, "lora_name", str, ...), field(body, "lora_path", str, ...))
        return self._adapters()

    async def load_lora_adapter_from_tensors(self, request: HTTPRequest) -> Response:
        """Refused."""
        name = field(parse_body(await request.body()), "lora_name", str, ...)
        raise adapter_error(
            f"Failed to load LoRA adapter {name}: this server never unpickles what it is sent; load it from disk",
            self.service.loaded_adapters(),
        )

    async def unload_lora_adapter(self, request: HTTPRequest) -> Response:
        """Waits for the requests that use it."""
        await self.service.unload_adapter(field(parse_body(await request.body()), "lora_name", str, ...))
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
                "weight_version": self.service.label,
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
                "weight_version": self.service.label,
                "max_total_num_tokens": self.service.engine.model.slots,
                "max_running_requests": self._options.max_running_requests,
                "max_req_input_len": longest_prompt(self.service.context_length, self.service.engine.model.slots),
                "tp_size": 1,
                "dp_size": 1,
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
            "max_running_requests": self._options.max_running_requests,
            "token_usage": (cache.slots - cache.free) / cache.slots,
            "gen_throughput": self.service.tokens_per_second,
        }
        return _json({"timestamp": time.time(), "version": _VERSION, "num_accelerators": 1, "loads": [load]})

    async def models(self, request: HTTPRequest) -> Response:
        """The base model and its adapters."""
        base = str(self.service.model_path)
        length = self.service.context_length
        entries = [{"id": base, "object": "model", "root": base, "parent": None, "max_model_len": length}]
        entries += [
            {"id": name, "object": "model", "root": path, "parent": base, "max_model_len": None}
            for name, path in self.service.loaded_adapters().items()
        ]
        return _json({"object": "list", "data": entries})

    def _adapters(self) -> Response:
        return _json(adapters_reply(self.service.loaded_adapters()))


async def _unknown(request: HTTPRequest, error: Exception) -> Response:
    """Routes and methods that are not there, and bodies that are too long."""
    assert isinstance(error, HTTPException)
    return _json({"detail": error.detail}, error.status_code)


def _load(options: ServerOptions, worker: Worker) -> Any:
    # Importing torch takes seconds, so that it happens in the worker too.
    from asyncrl.servers.embedded.loading import load_service

    return load_service(options, worker)


def _updated(message: str, label: object = None, **more: object) -> Response:
    if label is not None:
        message += f" Weight version updated to {label}."
    return _json({"success": True, "message": message} | more)


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
