"""A scripted SGLang server: the wire format without a model, for tests of everything that talks to one.

``ScriptedServer`` is an ASGI app. ``network({url: server})`` reaches it in-process, uvicorn serves it over sockets. Its
"model" is the number theta of the adapter or of the base weights (see ``asyncrl.testing.theta``).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import httpx
import orjson

from asyncrl.scheduling.pulse import Pulse
from asyncrl.testing.theta import holds_theta, read_theta, theta_logprobs

__all__ = ["Fault", "GenerateCall", "ScriptedServer", "network"]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_SAMPLING_KEYS = {
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "sampling_seed"),
    *("stop", "stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"),
}
# Those that a trainer may send; the real server knows a few more, and refuses any other.


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
    drop: bool = False
    """Cut the connection after the answer began."""
    lose: bool = False
    """Do what was asked, then cut the connection."""
    ignore: bool = False
    """Answer as if it had been done, and do nothing."""
    edit: Callable[[dict[str, Any]], None] | None = None
    """Change the reply before it is sent."""


class _Refused(Exception):
    """A 400 with this body."""

    def __init__(self, body: Mapping[str, object]) -> None:
        super().__init__(body)
        self.body = body


class _Cut(Exception):
    """The connection breaks."""


@dataclass(slots=True, eq=False)
class _Run:
    """A request that is being answered."""

    ended: anyio.Event = field(default_factory=anyio.Event)
    aborted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The weights that answer."""

    label: str
    theta: float


class ScriptedServer:
    """One server. Its public attributes are what happened; its methods make things happen.

    ``tokens(call)``: what is sampled, cut to ``max_new_tokens``; a last token in ``stop_token_ids`` counts as the stop.
    ``seconds(call)``: how long that takes on the loop's clock. ``ignores_adapters``: answer with the base weights.
    """

    def __init__(
        self,
        *,
        tokens: Callable[[GenerateCall], Sequence[int]] | None = None,
        seconds: Callable[[GenerateCall], float] = lambda call: 0.0,
        vocab_size: int = 256,
        ignores_adapters: bool = False,
    ) -> None:
        self._tokens = tokens or self._default_tokens
        self._seconds = seconds
        self._vocab_size = vocab_size
        self._ignores_adapters = ignores_adapters
        self._faults: dict[str, deque[Fault]] = {}
        self._running: dict[str, _Run] = {}
        self._known: dict[str, Path] = {}
        self._users: Counter[str] = Counter()
        self._changed = Pulse()
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
        self.reloaded: list[str] = []
        """Adapters that came back because a late request named them after they were unloaded."""
        self.peak_in_flight = 0
        self.adapters: dict[str, Path] = {}
        self.weight_version = "default"
        self.base_theta = 0.0
        self.paused: str | None = None
        self.limits: dict[str, int] = {}
        """Sizes that ``/server_info`` tells, such as ``max_req_input_len``."""
        self.down = False
        """In-process only: refuse connections."""

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    def fault(self, route: str, *faults: Fault) -> None:
        """The next calls of ``route`` meet these, one each."""
        self._faults.setdefault(route, deque()).extend(faults)

    def release(self) -> None:
        """Let every call go on that is held."""
        self._releases += 1
        for run in self._running.values():
            run.ended.set()
        self._changed.notify()

    def restart(self) -> None:
        """Come back as a new process: nothing is loaded."""
        self.adapters.clear()
        self._known.clear()
        self.weight_version, self.base_theta, self.paused = "default", 0.0, None

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``, about this server, holds."""
        await self._changed.wait_until(condition)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        assert scope["type"] == "http", "serve this app with lifespan='off'"
        route = scope["path"]
        body = orjson.loads(await _read(receive) or b"{}")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.calls.append((route, body))
        self.authorizations[route] = headers.get("authorization", "")
        queue = self._faults.get(route)
        fault = queue.popleft() if queue else Fault()
        self._changed.notify()
        try:
            status, content = await self._answer(route, body, fault)
        except _Cut:
            await _start(send, 200, length=1)
            # In-process the client's transport hands this through; over a socket the server closes the connection.
            raise httpx.ReadError("scripted: the connection was cut") from None
        finally:
            self._changed.notify()
        await _start(send, status, length=len(content))
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, route: str, body: Mapping[str, Any], fault: Fault) -> tuple[int, bytes]:
        if fault.drop:
            raise _Cut
        if fault.status is not None:
            return fault.status, fault.body
        if fault.hold and route != "/generate":
            seen = self._releases
            await self._changed.wait_until(lambda: self._releases > seen)
        try:
            reply = {"success": True} if fault.ignore else await self._handle(route, body, hold=fault.hold)
        except _Refused as refusal:
            return 400, orjson.dumps(refusal.body)
        if fault.edit is not None:
            fault.edit(reply)
        if fault.lose:
            raise _Cut
        return 200, orjson.dumps(reply)

    async def _handle(self, route: str, body: Mapping[str, Any], *, hold: bool) -> dict[str, Any]:
        if route == "/generate":
            return await self._generate(body, hold=hold)
        if route == "/unload_lora_adapter":
            return await self._unload(body["lora_name"])
        handlers: dict[str, Callable[[], dict[str, Any]]] = {
            "/model_info": lambda: {"model_path": "scripted", "weight_version": self.weight_version},
            "/server_info": lambda: {"version": "scripted", **self.limits},
            "/v1/loads": lambda: {"loads": [{"num_running_reqs": len(self._running), "num_waiting_reqs": 0}]},
            "/v1/models": self._models,
            "/load_lora_adapter": lambda: self._load(body["lora_name"], Path(body["lora_path"])),
            "/update_weights_from_disk": lambda: self._update(Path(body["model_path"]), body["weight_version"]),
            "/pause_generation": lambda: self._pause(body["mode"]),
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/abort_request": lambda: self._abort(body["rid"]),
        }
        return handlers[route]()

    async def _generate(self, body: Mapping[str, Any], *, hold: bool) -> dict[str, Any]:
        call = self._parse(body)
        scored = "logprob_start_len" in body
        (self.probes if scored else self.generated).append(call)
        self._changed.notify()
        run = self._running[call.rid] = _Run()
        adapter = call.lora_path or ""
        self._users[adapter] += 1
        self.peak_in_flight = max(self.peak_in_flight, len(self._running))
        try:
            await self._changed.wait_until(lambda: self.paused is None)
            before = self._state(call.lora_path)
            with anyio.move_on_after(math.inf if hold else self._seconds(call)):
                await run.ended.wait()
            await self._changed.wait_until(lambda: self.paused is None or run.aborted)
        finally:
            del self._running[call.rid]
            self._users[adapter] -= 1
        reply = self._reply(call, before, aborted=run.aborted)
        if scored:
            start = body["logprob_start_len"]
            triples = _triples(call.input_ids[start:], before.theta)
            reply["meta_info"]["input_token_logprobs"] = [[None, call.input_ids[start], None], *triples[1:]]
        return reply

    def _parse(self, body: Mapping[str, Any]) -> GenerateCall:
        unknown = set(body["sampling_params"]) - _SAMPLING_KEYS
        if unknown:
            raise _Refused({"error": f"unknown field `{min(unknown)}`, expected one of .."})
        if body["rid"] in self._running:
            raise _Refused({"error": {"message": f"Duplicate request ID detected: {body['rid']}"}})
        return GenerateCall(
            rid=body["rid"],
            input_ids=tuple(body["input_ids"]),
            sampling_params=body["sampling_params"],
            lora_path=body.get("lora_path"),
            extra_key=body.get("extra_key"),
        )

    def _state(self, adapter: str | None) -> _State:
        if adapter is None:
            return _State(label=self.weight_version, theta=self.base_theta)
        if adapter not in self.adapters:
            if adapter not in self._known:
                raise _Refused({"error": {"message": f"Got LoRA adapter that has never been loaded: {adapter}"}})
            self.adapters[adapter] = self._known[adapter]
            self.reloaded.append(adapter)
        theta = self.base_theta if self._ignores_adapters else read_theta(self.adapters[adapter])
        return _State(label=self.weight_version, theta=theta)

    def _reply(self, call: GenerateCall, before: _State, *, aborted: bool) -> dict[str, Any]:
        ids = list(self._tokens(call))[: call.sampling_params["max_new_tokens"]]
        ids = ids[: len(ids) // 2] if aborted else ids
        stopped = bool(ids) and ids[-1] in (call.sampling_params.get("stop_token_ids") or ())
        finish: dict[str, Any] = (
            {"type": "stop", "matched": ids[-1]} if stopped else {"type": "length", "length": len(ids)}
        )
        if aborted:
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        # An update in between falls in the middle; an adapter stays what it was when the request began.
        middle = len(ids) if before.label == self.weight_version else len(ids) // 2
        after = before.theta if call.lora_path else self.base_theta
        spans = [(before.label, 0, middle), (self.weight_version, middle, len(ids))]
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": call.rid,
                "finish_reason": finish,
                "prompt_tokens": len(call.input_ids),
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "weight_version": self.weight_version,
                "weight_versions": [{"version": label, "start": a, "end": b} for label, a, b in spans if a < b],
                "input_token_logprobs": [],
                "output_token_logprobs": _triples(ids[:middle], before.theta) + _triples(ids[middle:], after),
                "output_token_logprobs_length": len(ids),
            },
        }

    def _default_tokens(self, call: GenerateCall) -> list[int]:
        wanted = call.sampling_params["max_new_tokens"]
        return [(sum(call.input_ids) + 31 * i) % self._vocab_size for i in range(wanted)]

    def _models(self) -> dict[str, Any]:
        adapters = [{"id": name, "root": str(path), "parent": "scripted"} for name, path in self.adapters.items()]
        return {"data": [{"id": "scripted", "root": "scripted", "parent": None}, *adapters]}

    def _load(self, name: str, path: Path) -> dict[str, Any]:
        if name in self.adapters:
            raise _lora_refusal(f"Failed to load LoRA adapter {name} because it is already loaded")
        if not holds_theta(path):
            raise _lora_refusal(f"Failed to load LoRA adapter {name} from {path}")
        self.adapters[name] = self._known[name] = path
        return {"success": True, "error_message": "", "loaded_adapters": {}}

    async def _unload(self, name: str) -> dict[str, Any]:
        if self.adapters.pop(name, None) is None:
            raise _lora_refusal(f"LoRA adapter {name} is not loaded")
        await self._changed.wait_until(lambda: self._users[name] == 0)
        return {"success": True, "error_message": "", "loaded_adapters": {}}

    def _update(self, path: Path, label: str) -> dict[str, Any]:
        if not holds_theta(path):
            raise _Refused({"success": False, "message": f"Failed to get weights iterator: {path}"})
        self.base_theta, self.weight_version = read_theta(path), label
        return {"success": True, "message": f"Weight version updated to {label}.", "num_paused_requests": 0}

    def _pause(self, mode: str) -> dict[str, Any]:
        self.paused = mode
        if mode == "abort":
            for rid in list(self._running):
                self._end(rid)
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self) -> dict[str, Any]:
        self.paused = None
        return {"message": "Generation continued successfully.", "status": "ok"}

    def _flush(self) -> dict[str, Any]:
        if self._running and self.paused in (None, "in_place"):
            raise _Refused({"error": {"message": "Flush cache failed."}})
        return {}

    def _abort(self, rid: str) -> dict[str, Any]:
        self.aborted.append(rid)
        self._end(rid)
        return {}

    def _end(self, rid: str) -> None:
        if rid in self._running:
            self._running[rid].aborted = True
            self._running[rid].ended.set()


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


async def _start(send: Send, status: int, *, length: int) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


def _triples(tokens: Sequence[int], theta: float) -> list[list[Any]]:
    logprobs = theta_logprobs(tokens, theta).tolist()
    return [[logprob, int(token), None] for logprob, token in zip(logprobs, tokens, strict=True)]


def _lora_refusal(message: str) -> _Refused:
    return _Refused({"success": False, "error_message": message, "loaded_adapters": {}})
