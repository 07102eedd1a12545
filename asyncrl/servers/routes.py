"""SGLang's routes, but for ``/generate``, as our own servers answer them: bodies to calls of a backend, and replies.

What SGLang's front process holds is here: which weights it says are served, the session of updates that come in pieces,
and the groups through which they are broadcast. What computes is a ``Backend``: the embedded service or a scripted one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, get_args

import orjson

from asyncrl.sampling.replies import shown
from asyncrl.sampling.wire import PauseMode
from asyncrl.servers.backend import Backend, Broadcast, GroupPlace
from asyncrl.servers.wireserver import WireError, adapters_reply, bad_request, field, update_error

__all__ = ["METHODS", "Routes", "encoded"]

Body: TypeAlias = Mapping[str, Any]
Reply: TypeAlias = dict[str, Any] | str
_GROUP = "weight_update_group"
_MOST_RANKS = 2**16
_VISIBLE = re.compile(r"[!-~]{1,255}")


class Routes:
    """``model_info`` and ``server_info``: more of what these routes tell."""

    def __init__(
        self,
        backend: Backend,
        *,
        version: str,
        model_path: str,
        model_info: Mapping[str, Any],
        server_info: Mapping[str, Any],
    ) -> None:
        self.label = "default"
        """Of the last update that succeeded; requests may carry another one after an update that could not flush."""
        self._backend = backend
        self._version = version
        self._model_path = self._first_path = model_path
        self._more_model_info = model_info
        self._more_server_info = server_info
        self._session = False
        self._groups: dict[str, Any] = {}

    async def answer(self, route: str, body: Body) -> Reply:
        """The reply to ``body``, which is {} for a route that is only read; ``WireError`` for any status but 200."""
        return await _HANDLERS[route](self, body)

    def rename(self, label: str) -> None:
        """Tell another label."""
        self.label = label

    # -- what is read -------------------------------------------------------------------------------------------------

    async def _health(self, body: Body) -> Reply:
        return ""

    async def _ready(self, body: Body) -> Reply:
        if self._backend.paused is not None:
            raise WireError(503, "")
        return ""

    async def _model_info(self, body: Body) -> Reply:
        served = {"model_path": self._model_path, "served_model_name": self._model_path, "weight_version": self.label}
        return served | {"tokenizer_path": self._first_path, "is_generation": True} | dict(self._more_model_info)

    async def _server_info(self, body: Body) -> Reply:
        known = {"version": self._version, "frontend": "python", "status": "ready", "tp_size": 1, "dp_size": 1}
        known["weight_version"] = self.label
        return known | self._backend.limits.told() | dict(self._more_server_info)

    async def _loads(self, body: Body) -> Reply:
        limits, (running, waiting) = self._backend.limits, self._backend.load
        load: dict[str, float] = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "gen_throughput": self._backend.tokens_per_second,
        }
        if limits.max_total_tokens is not None and limits.max_running_requests is not None:
            load |= {
                "num_used_tokens": self._backend.used_tokens,
                "max_total_num_tokens": limits.max_total_tokens,
                "max_running_requests": limits.max_running_requests,
                "token_usage": self._backend.used_tokens / limits.max_total_tokens,
            }
        return {"timestamp": time.time(), "version": self._version, "num_accelerators": 1, "loads": [load]}

    async def _models(self, body: Body) -> Reply:
        base, length = self._model_path, self._backend.limits.context_length
        models = [{"id": base, "object": "model", "root": base, "parent": None, "max_model_len": length}]
        models += [
            {"id": name, "object": "model", "root": path, "parent": base, "max_model_len": None}
            for name, path in self._backend.adapters.paths.items()
        ]
        return {"object": "list", "data": models}

    # -- requests and pauses ------------------------------------------------------------------------------------------

    async def _abort_request(self, body: Body) -> Reply:
        rid = field(body, "rid", str)
        if field(body, "abort_all", bool, False):
            await self._backend.abort_all()
        elif rid:
            await self._backend.abort(rid)
        return ""

    async def _pause_generation(self, body: Body) -> Reply:
        mode = field(body, "mode", str, "abort")
        if mode not in get_args(PauseMode):
            raise bad_request(f"mode is {mode!r}, not abort, retract or in_place")
        await self._backend.pause(mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue_generation(self, body: Body) -> Reply:
        self._backend.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush_cache(self, body: Body) -> Reply:
        if not await self._backend.flush():
            raise WireError(400, "Flush cache failed.\n")
        return "Cache flushed.\n"

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _update_weights_from_disk(self, body: Body) -> Reply:
        path, update = Path(field(body, "model_path", str, ...)), _Update(body)
        reply = await self._replace(path, update, "Succeeded to update model weights.")
        self._model_path = str(path)
        return reply | {"num_paused_requests": 0}

    async def _begin_weight_update(self, body: Body) -> Reply:
        """Open the session that updates in pieces need, once nothing runs or while paused."""
        async with self._backend.exclusive():
            if self._session:
                raise update_error("a weight-update session is already open; call end_weight_update() first")
            self._session = True
        return _done("Success")

    async def _end_weight_update(self, body: Body) -> Reply:
        async with self._backend.exclusive():
            if not self._session:
                raise update_error("no weight-update session is open; call begin_weight_update() first")
            self._session = False
        return _done("Success")

    async def _update_weights_from_tensor(self, body: Body) -> Reply:
        payloads, update = _payloads(body), _Update(body)
        self._require_session("update_weights_from_tensor")
        return await self._replace(self._backend.unpacked(payloads), update, "Success")

    async def _update_weights_from_distributed(self, body: Body) -> Reply:
        self._require_session("update_weights_from_distributed")
        names, dtypes, shapes = (field(body, key, list, ...) for key in ("names", "dtypes", "shapes"))
        flattened = body.get("load_format") == "flattened_bucket"
        name, update = _group_name(body), _Update(body)
        if name not in self._groups:
            raise update_error(
                f"Failed to receive weights: Group {name} not in {list(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        if not len(names) == len(dtypes) == len(shapes):
            raise bad_request(
                f"names, dtypes and shapes must be of one length, but have {len(names)}, {len(dtypes)}, {len(shapes)}"
            )
        broadcast = Broadcast(names=names, dtypes=dtypes, shapes=shapes, flattened=flattened)
        weights = await self._backend.receive(self._groups[name], broadcast)
        return await self._replace(weights, update, "Succeeded to update parameter online.")

    async def _init_weights_update_group(self, body: Body) -> Reply:
        world_size = _within(body, "world_size", 2, _MOST_RANKS)
        place = GroupPlace(
            name=_group_name(body),
            address=field(body, "master_address", str, ...),
            port=_within(body, "master_port", 1, 65_535),
            rank=_within(body, "rank_offset", 1, world_size - 1),
            world_size=world_size,
            backend=field(body, "backend", str, "nccl"),
        )
        if not _VISIBLE.fullmatch(place.address):
            raise bad_request(f"master_address is {shown(place.address)}, but must be the name or address of a host")
        if place.name in self._groups:
            raise update_error(f"Failed to initialize custom process group: {place.name} exists already")
        self._groups[place.name] = await self._backend.join(place)
        return _done("Succeeded to initialize custom process group.")

    async def _destroy_weights_update_group(self, body: Body) -> Reply:
        if self._groups.pop(field(body, "group_name", str, _GROUP), self) is self:
            raise update_error("The group to be destroyed does not exist.")
        return _done("Succeeded to destroy custom process group.")

    async def _update_weight_version(self, body: Body) -> Reply:
        label = field(body, "new_version", str, ...)
        if field(body, "abort_all_requests", bool, True):
            await self._backend.abort_all()
        await self._backend.update(None, label)
        self.rename(label)
        return _done(f"Weight version updated to {label}") | {"new_version": label}

    async def _weights_checker(self, body: Body) -> Reply:
        """Digests of the weights; nothing else that SGLang's can do."""
        action = field(body, "action", str, "checksum")
        if action != "checksum":
            raise update_error(f"Unsupported action={action!r}")
        sums = await self._backend.checksums()
        whole = hashlib.sha256("".join(sums.values()).encode()).hexdigest()[:16]
        rank = {"checksums": sums, "per_gpu_checksum": whole}
        return _done("Success.") | {"ranks": [rank], "per_engine_checksum": whole}

    # -- adapters -----------------------------------------------------------------------------------------------------

    async def _load_lora_adapter(self, body: Body) -> Reply:
        await self._backend.adapters.load(field(body, "lora_name", str, ...), field(body, "lora_path", str, ...))
        return adapters_reply(self._backend.adapters.paths)

    async def _load_lora_adapter_from_tensors(self, body: Body) -> Reply:
        name, _ = field(body, "lora_name", str, ...), field(body, "config_dict", dict, ...)
        await self._backend.adapters.load(name, _payloads(body))
        return adapters_reply(self._backend.adapters.paths)

    async def _unload_lora_adapter(self, body: Body) -> Reply:
        await self._backend.adapters.unload(field(body, "lora_name", str, ...))
        return adapters_reply(self._backend.adapters.paths)

    def _require_session(self, call: str) -> None:
        if not self._session:
            raise update_error(f"{call} must run between begin_weight_update() and end_weight_update()")

    async def _replace(self, weights: Any, update: _Update, message: str) -> dict[str, Any]:
        """If the flush is refused the weights are replaced all the same, as in SGLang."""
        if update.abort_all:
            await self._backend.abort_all()
        async with self._backend.exclusive():
            try:
                await self._backend.update(weights, update.label)
            except (OSError, ValueError) as error:
                raise update_error(f"Failed to update weights: {error}") from error
            flushed = not update.flush or await self._backend.flush()
        if not flushed:
            raise update_error(
                "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                "Retract or finish them, then call /flush_cache."
            )
        if update.label is None:
            return _done(message)
        self.rename(update.label)
        return _done(f"{message} Weight version updated to {update.label}.")


Handler: TypeAlias = Callable[[Routes, Body], Awaitable[Reply]]
_READ: Mapping[str, Handler] = {
    "/health": Routes._health,
    "/ready": Routes._ready,
    "/model_info": Routes._model_info,
    "/server_info": Routes._server_info,
    "/v1/loads": Routes._loads,
    "/v1/models": Routes._models,
}
_WRITTEN: Mapping[str, Handler] = {
    f"/{handler.__name__[1:]}": handler
    for handler in (
        Routes._abort_request,
        Routes._pause_generation,
        Routes._continue_generation,
        Routes._flush_cache,
        Routes._update_weights_from_disk,
        Routes._begin_weight_update,
        Routes._end_weight_update,
        Routes._update_weights_from_tensor,
        Routes._update_weights_from_distributed,
        Routes._init_weights_update_group,
        Routes._destroy_weights_update_group,
        Routes._update_weight_version,
        Routes._weights_checker,
        Routes._load_lora_adapter,
        Routes._load_lora_adapter_from_tensors,
        Routes._unload_lora_adapter,
    )
}
_HANDLERS: Mapping[str, Handler] = {**_READ, **_WRITTEN}
METHODS: Mapping[str, str] = {
    **dict.fromkeys(_READ, "GET"),
    **dict.fromkeys(_WRITTEN, "POST"),
    "/generate": "POST",
}
"""Every route, and its method."""


def encoded(reply: Reply) -> tuple[bytes, str]:
    """The body of a reply, and its media type."""
    return (reply.encode(), "text/plain") if isinstance(reply, str) else (orjson.dumps(reply), "application/json")


class _Update:
    """How the body of an update wants it."""

    def __init__(self, body: Body) -> None:
        self.label: str | None = field(body, "weight_version", str)
        self.flush: bool = field(body, "flush_cache", bool, True)
        self.abort_all: bool = field(body, "abort_all_requests", bool, False)


def _done(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}


def _payloads(body: Body) -> list[bytes]:
    payloads = field(body, "serialized_named_tensors", list, ...)
    try:
        return [base64.b64decode(str(payload)) for payload in payloads]
    except binascii.Error as error:
        raise bad_request(f"serialized_named_tensors: {error}") from error


def _within(body: Body, key: str, least: int, most: int) -> int:
    value: int = field(body, key, int, ...)
    if not least <= value <= most:
        raise bad_request(f"{key} is {shown(value)}, but must be from {least} to {most}")
    return value


def _group_name(body: Body) -> str:
    name: str = field(body, "group_name", str, _GROUP)
    if not _VISIBLE.fullmatch(name):
        raise bad_request(f"group_name is {shown(name)}, but must be up to 255 visible characters")
    return name
