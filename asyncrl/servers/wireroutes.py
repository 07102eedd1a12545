"""SGLang's routes as our own servers have them, the embedded and the scripted one: bodies to calls, and to replies.

``/generate`` is left out: each server answers that with its own idea of a request under way.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from asyncrl.servers.adapters import Adapters
from asyncrl.servers.wireserver import WireError, adapters_reply, bad_request, field, update_error

__all__ = ["UpdateSession", "WireRoutes", "update_options"]

_NOT_FLUSHED = "Flush cache failed.\n"
Body: TypeAlias = Mapping[str, Any]


class UpdateSession(ABC):
    """Weight updates in pieces: the session that SGLang wants around them, and the process groups they come through.

    ``exclusive`` is a context in which no request runs.
    """

    def __init__(self, exclusive: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._exclusive = exclusive
        self._open = False
        self._groups: dict[str, Any] = {}

    async def begin(self) -> None:
        """Open the session, once nothing runs or while paused; ``WireError`` if one is open."""
        async with self._exclusive():
            if self._open:
                raise update_error("a weight-update session is already open; call end_weight_update() first")
            self._open = True

    async def end(self) -> None:
        """Close the session; ``WireError`` if none is open."""
        async with self._exclusive():
            if not self._open:
                raise update_error("no weight-update session is open; call begin_weight_update() first")
            self._open = False

    def leave(self, group: str) -> None:
        """Forget a process group; ``WireError`` if it was never joined."""
        if group not in self._groups:
            raise update_error("The group to be destroyed does not exist.")
        del self._groups[group]

    @abstractmethod
    async def join(self, body: Body) -> None:
        """Join the process group that ``body`` describes."""

    @abstractmethod
    async def receive(self, body: Body) -> None:
        """Take the weights that ``body`` names from a process group."""

    @abstractmethod
    async def receive_tensors(self, payloads: Sequence[object], body: Body) -> None:
        """Take weights that came in the request, in base64."""

    def _require_open(self, call: str) -> None:
        if not self._open:
            raise update_error(f"{call} must run between begin_weight_update() and end_weight_update()")

    def _require_group(self, name: str) -> Any:
        if name not in self._groups:
            raise update_error(
                f"Failed to receive weights: Group {name} not in {sorted(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        return self._groups[name]


class _Served(Protocol):
    """What is behind the routes; each method does what the route of its name does, or raises ``WireError``."""

    @property
    def paused(self) -> object: ...
    @property
    def label(self) -> str: ...
    @property
    def model_path(self) -> Path | str: ...
    @property
    def context_length(self) -> int | None: ...
    @property
    def adapters(self) -> Adapters[Any]: ...
    @property
    def load(self) -> tuple[int, int]: ...
    @property
    def tokens_per_second(self) -> float: ...
    def model_details(self) -> Mapping[str, Any]: ...
    def server_details(self) -> Mapping[str, Any]: ...
    def load_details(self) -> Mapping[str, Any]: ...
    def resume(self) -> None: ...
    async def abort(self, rid: str) -> None: ...
    async def abort_all(self) -> None: ...
    async def pause(self, mode: Any) -> None: ...
    async def flush(self) -> bool: ...
    async def update_weights(self, weights: Path, label: str | None, *, flush: bool, abort_all: bool) -> None: ...
    async def relabel(self, label: str) -> None: ...
    async def checksums(self) -> dict[str, str]: ...
    async def load_adapter_from_tensors(self, name: str, payloads: Sequence[object]) -> None: ...


class WireRoutes:
    """``version`` is what the server calls itself; ``updates`` are those in pieces."""

    def __init__(self, served: _Served, updates: UpdateSession, *, version: str) -> None:
        self._served = served
        self._updates = updates
        self._version = version
        self._read: dict[str, Callable[[], Any]] = {
            "/health": str,
            "/ready": str,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/v1/models": self._models,
        }
        self._write: dict[str, Callable[[Body], Awaitable[Any]]] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weights_from_tensor": self._update_from_tensor,
            "/update_weights_from_distributed": self._update_from_distributed,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/update_weight_version": self._relabel,
            "/weights_checker": self._checksum,
            "/load_lora_adapter": self._load_adapter,
            "/load_lora_adapter_from_tensors": self._load_adapter_from_tensors,
            "/unload_lora_adapter": self._unload_adapter,
        }

    async def answer(self, method: str, route: str, body: Body) -> tuple[int, Any]:
        """Status and reply, which is an object or text; ``WireError`` for what is refused or not there."""
        if method == "GET" and route in self._read:
            return 503 if route == "/ready" and self._served.paused else 200, self._read[route]()
        if method == "POST" and route in self._write:
            reply = await self._write[route](body)
            return 400 if reply == _NOT_FLUSHED else 200, reply
        if route == "/generate" or route in self._read or route in self._write:
            raise WireError(405, {"detail": "Method Not Allowed"})
        raise WireError(404, {"detail": "Not Found"})

    def _model_info(self) -> dict[str, Any]:
        path = str(self._served.model_path)
        known = {"model_path": path, "served_model_name": path, "is_generation": True}
        return {**known, "weight_version": self._served.label, **self._served.model_details()}

    def _server_info(self) -> dict[str, Any]:
        known = {"version": self._version, "frontend": "python", "status": "ready", "tp_size": 1, "dp_size": 1}
        return {**known, "weight_version": self._served.label, **self._served.server_details()}

    def _loads(self) -> dict[str, Any]:
        running, waiting = self._served.load
        load: dict[str, Any] = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}
        load |= {"gen_throughput": self._served.tokens_per_second, **self._served.load_details()}
        return {"timestamp": time.time(), "version": self._version, "num_accelerators": 1, "loads": [load]}

    def _models(self) -> dict[str, Any]:
        base, length = str(self._served.model_path), self._served.context_length
        models = [{"id": base, "object": "model", "root": base, "parent": None, "max_model_len": length}]
        models += [
            {"id": name, "object": "model", "root": path, "parent": base, "max_model_len": None}
            for name, path in self._served.adapters.paths().items()
        ]
        return {"object": "list", "data": models}

    async def _abort(self, body: Body) -> str:
        rid = field(body, "rid", str)
        if field(body, "abort_all", bool, False):
            await self._served.abort_all()
        elif rid:
            await self._served.abort(rid)
        return ""

    async def _pause(self, body: Body) -> dict[str, Any]:
        mode = field(body, "mode", str, "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise bad_request(f"mode is {mode!r}, not abort, retract or in_place")
        await self._served.pause(mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, body: Body) -> dict[str, Any]:
        self._served.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush(self, body: Body) -> str:
        return "Cache flushed.\n" if await self._served.flush() else _NOT_FLUSHED

    async def _update_from_disk(self, body: Body) -> dict[str, Any]:
        await self._served.update_weights(Path(field(body, "model_path", str, ...)), **update_options(body))
        return _updated("Succeeded to update model weights.", body, num_paused_requests=0)

    async def _update_from_tensor(self, body: Body) -> dict[str, Any]:
        await self._updates.receive_tensors(field(body, "serialized_named_tensors", list, ...), body)
        return _updated("Success", body)

    async def _update_from_distributed(self, body: Body) -> dict[str, Any]:
        await self._updates.receive(body)
        return _updated("Succeeded to update parameter online.", body)

    async def _begin(self, body: Body) -> dict[str, Any]:
        await self._updates.begin()
        return {"success": True, "message": "Success"}

    async def _end(self, body: Body) -> dict[str, Any]:
        await self._updates.end()
        return {"success": True, "message": "Success"}

    async def _join(self, body: Body) -> dict[str, Any]:
        await self._updates.join(body)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def _leave(self, body: Body) -> dict[str, Any]:
        self._updates.leave(field(body, "group_name", str, "weight_update_group"))
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def _relabel(self, body: Body) -> dict[str, Any]:
        label = field(body, "new_version", str, ...)
        if field(body, "abort_all_requests", bool, True):
            await self._served.abort_all()
        await self._served.relabel(label)
        return {"success": True, "message": f"Weight version updated to {label}", "new_version": label}

    async def _checksum(self, body: Body) -> dict[str, Any]:
        action = field(body, "action", str, "checksum")
        if action != "checksum":
            raise update_error(f"Unsupported action={action!r}")
        sums = await self._served.checksums()
        whole = hashlib.sha256("".join(sums.values()).encode()).hexdigest()[:16]
        rank = {"checksums": sums, "per_gpu_checksum": whole}
        return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole}

    async def _load_adapter(self, body: Body) -> dict[str, Any]:
        await self._served.adapters.load(field(body, "lora_name", str, ...), field(body, "lora_path", str, ...))
        return adapters_reply(self._served.adapters.paths())

    async def _load_adapter_from_tensors(self, body: Body) -> dict[str, Any]:
        name = field(body, "lora_name", str, ...)
        field(body, "config_dict", dict, ...)
        await self._served.load_adapter_from_tensors(name, field(body, "serialized_named_tensors", list, ...))
        return adapters_reply(self._served.adapters.paths())

    async def _unload_adapter(self, body: Body) -> dict[str, Any]:
        await self._served.adapters.unload(field(body, "lora_name", str, ...))
        return adapters_reply(self._served.adapters.paths())


def update_options(body: Body) -> dict[str, Any]:
    """What every update may say: its ``label``, whether to ``flush`` the cache, and to ``abort_all`` requests."""
    return {
        "label": field(body, "weight_version", str),
        "flush": field(body, "flush_cache", bool, True),
        "abort_all": field(body, "abort_all_requests", bool, False),
    }


def _updated(message: str, body: Body, **more: object) -> dict[str, Any]:
    if body.get("weight_version") is not None:
        message += f" Weight version updated to {body['weight_version']}."
    return {"success": True, "message": message} | more
