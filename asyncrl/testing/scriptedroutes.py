"""The routes of a scripted server: bodies to calls of its engine, and what those return to replies."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.servers.wireserver import WireError, adapters_reply, bad_request, field, longest_prompt, update_error
from asyncrl.testing.scriptedengine import ScriptedEngine

__all__ = ["ScriptedRoutes"]

_GROUP = "weight_update_group"
_NOT_FLUSHED = "Flush cache failed.\n"
Body: TypeAlias = Mapping[str, Any]


class ScriptedRoutes:
    """Every route but ``/generate``. ``limits`` are more sizes for ``/server_info`` to tell."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.limits: dict[str, int] = {}
        self._read: dict[str, Callable[[], Any]] = {
            "/health": lambda: "",
            "/ready": lambda: "",
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
            "/init_weights_update_group": self._join_group,
            "/destroy_weights_update_group": self._leave_group,
            "/update_weight_version": self._relabel,
            "/weights_checker": self._checksum,
            "/load_lora_adapter": self._load_adapter,
            "/load_lora_adapter_from_tensors": self._load_adapter_from_tensors,
            "/unload_lora_adapter": self._unload_adapter,
        }

    async def answer(self, method: str, route: str, body: Body) -> tuple[int, Any]:
        """Status and reply; that is an object, or text."""
        if route == "/ready" and self._engine.paused is not None:
            return 503, ""
        if method == "GET" and route in self._read:
            return 200, self._read[route]()
        if method == "POST" and route in self._write:
            reply = await self._write[route](body)
            return 400 if reply == _NOT_FLUSHED else 200, reply
        if route in self._read or route in self._write:
            raise WireError(405, {"detail": "Method Not Allowed"})
        raise WireError(404, {"detail": "Not Found"})

    def _model_info(self) -> dict[str, Any]:
        engine = self._engine
        served = {"model_path": engine.model_path, "served_model_name": engine.model_path}
        return served | {"tokenizer_path": "scripted", "is_generation": True, "weight_version": engine.label}

    def _server_info(self) -> dict[str, Any]:
        known = {"version": "scripted", "frontend": "python", "status": "ready", "tp_size": 1, "dp_size": 1}
        limits = self._engine.limits
        sizes = {
            "max_total_num_tokens": limits.max_total_tokens,
            "max_running_requests": limits.max_running_requests,
        }
        if limits.context_length is not None:
            pool = limits.max_total_tokens or limits.context_length
            sizes["max_req_input_len"] = longest_prompt(limits.context_length, pool)
        told = {name: size for name, size in sizes.items() if size is not None}
        return known | {"weight_version": self._engine.label} | told | self.limits

    def _loads(self) -> dict[str, Any]:
        running, waiting = self._engine.load
        load: dict[str, float] = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "gen_throughput": self._engine.tokens_per_second,
        }
        limits = self._engine.limits
        if limits.max_total_tokens is not None and limits.max_running_requests is not None:
            load |= {
                "max_total_num_tokens": limits.max_total_tokens,
                "max_running_requests": limits.max_running_requests,
                "token_usage": 0.0,
            }
        return {"version": "scripted", "num_accelerators": 1, "loads": [load]}

    def _models(self) -> dict[str, Any]:
        base = self._engine.model_path
        length = self._engine.limits.context_length
        models = [{"id": base, "object": "model", "root": base, "parent": None, "max_model_len": length}]
        models += [
            {"id": name, "object": "model", "root": str(path), "parent": base, "max_model_len": None}
            for name, path in self._engine.adapters.paths.items()
        ]
        return {"object": "list", "data": models}

    async def _abort(self, body: Body) -> str:
        rid = field(body, "rid", str)
        if field(body, "abort_all", bool, False):
            self._engine.abort_all()
        elif rid:
            self._engine.abort(rid)
        return ""

    async def _pause(self, body: Body) -> dict[str, Any]:
        mode = field(body, "mode", str, "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise bad_request(f"mode is {mode!r}, not abort, retract or in_place")
        await self._engine.pause(mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, body: Body) -> dict[str, Any]:
        self._engine.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush(self, body: Body) -> str:
        return "Cache flushed.\n" if self._engine.flush() else _NOT_FLUSHED

    async def _update_from_disk(self, body: Body) -> dict[str, Any]:
        path = Path(field(body, "model_path", str, ...))
        await self._engine.update_from_disk(path, **_update(body))
        return _updated("Succeeded to update model weights.", body, num_paused_requests=0)

    async def _update_from_tensor(self, body: Body) -> dict[str, Any]:
        content = _decoded(field(body, "serialized_named_tensors", list, ...))
        await self._engine.update_in_session("update_weights_from_tensor", content, **_update(body))
        return _updated("Success", body)

    async def _update_from_distributed(self, body: Body) -> dict[str, Any]:
        names = [str(name).encode() for name in field(body, "names", list, ...)]
        field(body, "dtypes", list, ...), field(body, "shapes", list, ...)
        self._engine.require_group(field(body, "group_name", str, _GROUP))
        await self._engine.update_in_session("update_weights_from_distributed", names, **_update(body))
        return _updated("Succeeded to update parameter online.", body)

    async def _begin(self, body: Body) -> dict[str, Any]:
        await self._engine.begin_update()
        return {"success": True, "message": "Success"}

    async def _end(self, body: Body) -> dict[str, Any]:
        await self._engine.end_update()
        return {"success": True, "message": "Success"}

    async def _join_group(self, body: Body) -> dict[str, Any]:
        field(body, "master_address", str, ...)
        for key in ("master_port", "rank_offset", "world_size"):
            field(body, key, int, ...)
        self._engine.join_group(field(body, "group_name", str, _GROUP))
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def _leave_group(self, body: Body) -> dict[str, Any]:
        self._engine.leave_group(field(body, "group_name", str, _GROUP))
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def _relabel(self, body: Body) -> dict[str, Any]:
        label = field(body, "new_version", str, ...)
        if field(body, "abort_all_requests", bool, True):
            self._engine.abort_all()
        self._engine.relabel(label)
        return {"success": True, "message": f"Weight version updated to {label}", "new_version": label}

    async def _checksum(self, body: Body) -> dict[str, Any]:
        action = field(body, "action", str, "checksum")
        if action != "checksum":
            raise update_error(f"Unsupported action={action!r}")
        digest = hashlib.sha256(str(self._engine.theta).encode()).hexdigest()
        rank = {"checksums": {"theta": digest[:16]}, "per_gpu_checksum": digest}
        return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": digest}

    async def _load_adapter(self, body: Body) -> dict[str, Any]:
        name, path = field(body, "lora_name", str, ...), field(body, "lora_path", str, ...)
        await self._engine.adapters.load(name, Path(path))
        return self._adapters()

    async def _load_adapter_from_tensors(self, body: Body) -> dict[str, Any]:
        name = field(body, "lora_name", str, ...)
        field(body, "config_dict", dict, ...)
        content = _decoded(field(body, "serialized_named_tensors", list, ...))
        await self._engine.adapters.load(name, Path(), content)
        return self._adapters()

    async def _unload_adapter(self, body: Body) -> dict[str, Any]:
        await self._engine.adapters.unload(field(body, "lora_name", str, ...))
        return self._adapters()

    def _adapters(self) -> dict[str, Any]:
        return adapters_reply({name: str(path) for name, path in self._engine.adapters.paths.items()})


def _update(body: Body) -> dict[str, Any]:
    return {
        "label": field(body, "weight_version", str),
        "flush": field(body, "flush_cache", bool, True),
        "abort_all": field(body, "abort_all_requests", bool, False),
    }


def _updated(message: str, body: Body, **more: object) -> dict[str, Any]:
    if body.get("weight_version") is not None:
        message += f" Weight version updated to {body['weight_version']}."
    return {"success": True, "message": message} | more


def _decoded(payloads: Sequence[object]) -> list[bytes]:
    return [base64.b64decode(str(payload)) for payload in payloads]
