"""The control plane of one sampling server: adapters, weights, pauses, and scoring of fixed tokens.

Every call checks the status and the reply's ``success``, and has a deadline for all of it, from the connection to the
last byte: a short one, or a long one if it loads weights or waits for requests. Leaves out which servers to call, and
when.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import orjson

from asyncrl.errors import ConfigError, ProtocolError, RequestRefused, SamplingError, ServerUnavailable
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.deadlines import HoldClock
from asyncrl.sampling.replies import Load, adapter_names, context_of, parse_load, ranks_of, scored, shown
from asyncrl.sampling.sources import KNOWN_VERSIONS
from asyncrl.sampling.transport import TRANSPORT_ERRORS, Answer, Client, was_stale
from asyncrl.sampling.wire import PauseMode, error_text, generate_body
from asyncrl.types import FloatArray, IntArray

__all__ = ["LONG_S", "Served", "ServerControl", "ask"]

_QUICK_S = 30.0
_ABORT_S = 5.0
LONG_S = 300.0
"""For one server to take a version, or to give up an adapter."""
_FLAT = "flattened_bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server says about itself before it gets requests."""

    version: str
    context_tokens: int | None
    """Most tokens of prompt and output together that it takes without shortening or refusing; None: it does not say."""
    label: str
    """Of the base weights that it holds."""


class ServerControl:
    """One server. ``admin_key`` opens the control routes where it differs from ``api_key``.

    ``long_s``: deadline of what loads weights or waits for requests. ``clock``: stands still while the server is held.
    """

    def __init__(
        self,
        client: Client,
        url: str,
        *,
        api_key: str | None,
        admin_key: str | None,
        long_s: float = LONG_S,
        clock: HoldClock | None = None,
    ) -> None:
        self.url = url
        self.clock = clock or HoldClock()
        self._long_s = long_s
        self._paused = False
        self.calls: dict[int, tuple[float, str]] = {}
        """Calls under way: since when, and their route. For messages."""
        self._numbers = count()
        self._client = client
        self._data_headers = _bearer(api_key)
        self._generate_url = url + "/generate"
        self._admin_headers = _bearer(admin_key or api_key)
        # Of one server only one large body is made at a time.
        self._encoders = anyio.CapacityLimiter(1)

    async def model_info(self) -> Mapping[str, Any]:
        """What the server says about its model."""
        return await self._get("/model_info")

    async def server_info(self) -> Mapping[str, Any]:
        """Resolved options and software version; slow while the server is busy."""
        return await self._get("/server_info")

    async def load(self) -> Load:
        """Running and waiting requests and memory in use; quick, also while the server is busy."""
        with self._reading("/v1/loads"):
            return parse_load(await self._get("/v1/loads"))

    async def weight_label(self) -> str:
        """The label of the base weights that the server holds; ours are those of ``labels``."""
        label = (await self.model_info()).get("weight_version")
        return label if isinstance(label, str) else shown(label)

    async def adapters(self) -> set[str]:
        """Names of the loaded LoRA adapters."""
        with self._reading("/v1/models"):
            return adapter_names(await self._get("/v1/models"))

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the PEFT folder ``path``, readable by the server, as ``name``. A name in use is refused."""
        with self.clock.held():
            await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, within_s=self._long_s)

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter. Returns when the last request that uses it has ended."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, within_s=self._long_s)

    async def update_from_disk(self, path: Path, label: str) -> None:
        """Replace the base weights by the model folder ``path``. The prefix cache is left as it is: see ``flush``."""
        # Flushing in the same call is refused while anything runs, after the weights were replaced all the same.
        body = {"model_path": str(path), "weight_version": label, "flush_cache": False}
        with self.clock.held():
            await self._post("/update_weights_from_disk", body, within_s=self._long_s)

    async def load_adapter_tensors(self, name: str, config: Mapping[str, Any], payloads: Sequence[str]) -> None:
        """Load an adapter that travels in the request; ``payloads``: one flat bucket for each tensor-parallel rank."""
        body = {
            "lora_name": name,
            "config_dict": config,
            "serialized_named_tensors": payloads,
            "load_format": _FLAT,
        }
        await self._post_large("/load_lora_adapter_from_tensors", body)

    async def tensor_ranks(self) -> int:
        """How many tensor-parallel ranks the server has; each takes a copy of its own of what is sent."""
        with self._reading("/server_info"):
            return ranks_of(await self.server_info())

    async def begin_update(self) -> None:
        """Open a session for weights that arrive in pieces. One that somebody left open is closed first."""
        try:
            await self._post("/begin_weight_update", {}, within_s=self._long_s)
        except RequestRefused:
            await self.end_update()
            await self._post("/begin_weight_update", {}, within_s=self._long_s)

    async def end_update(self) -> None:
        """Close the session; the server then prepares the new weights for use."""
        await self._post("/end_weight_update", {}, within_s=self._long_s)

    async def update_from_tensors(self, payloads: Sequence[str], label: str | None) -> None:
        """Replace some weights, within a session. ``payloads``: one flat bucket for each tensor-parallel rank.

        ``label``: given with the last bucket, because it counts from then on.
        """
        body = {
            "serialized_named_tensors": payloads,
            "load_format": _FLAT,
            "flush_cache": False,
            "weight_version": label,
        }
        await self._post_large("/update_weights_from_tensor", body)

    async def join_group(
        self, *, name: str, address: str, port: int, first_rank: int, world_size: int, backend: str
    ) -> None:
        """Join a process group for weights as the ranks from ``first_rank`` on; returns when all of it have joined."""
        body = {
            "group_name": name,
            "master_address": address,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world_size,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, within_s=self._long_s)

    async def leave_group(self, name: str) -> None:
        """Leave a process group."""
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def update_from_group(
        self,
        group: str,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        label: str | None,
    ) -> None:
        """Replace some weights, within a session, by a flat bucket that rank 0 of ``group`` broadcasts meanwhile.

        ``label``: given with the last bucket, because it counts from then on.
        """
        body = {
            "group_name": group,
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "load_format": _FLAT,
            "flush_cache": False,
            "weight_version": label,
        }
        with self.clock.held():
            await self._post("/update_weights_from_distributed", body, within_s=self._long_s)

    async def checksum(self) -> str:
        """A digest of the base weights: equal on servers with the same ones. Reads all of them, so it takes long."""
        reply = await self._post("/weights_checker", {"action": "checksum"}, within_s=self._long_s)
        found = reply.get("per_engine_checksum")
        if not isinstance(found, str):
            raise ProtocolError(f"{self.url}/weights_checker: per_engine_checksum is {shown(found)}, not a text")
        return found

    async def pause(self, mode: PauseMode) -> None:
        """Stop computing; new requests wait at the server until ``continue_``."""
        if not self._paused:
            self._paused = True
            self.clock.hold()
        # In mode "abort" the server answers only when every request has ended.
        await self._post("/pause_generation", {"mode": mode}, within_s=self._long_s)

    async def continue_(self) -> None:
        """Go on after ``pause``."""
        try:
            await self._post("/continue_generation", {})
        finally:
            # If that had no effect the server hangs, and its requests are late.
            if self._paused:
                self._paused = False
                self.clock.let_go()

    async def flush(self) -> None:
        """Forget the prefix cache; refused while requests run or are frozen in place."""
        await self._tell("/flush_cache", {})

    async def abort(self, rid: str) -> bool:
        """Try to end one request. False if the server did not take that: there is nothing left to do about it."""
        try:
            await self._tell("/abort_request", {"rid": rid}, within_s=_ABORT_S)
        except SamplingError:
            return False
        return True

    async def generate(self, body: Mapping[str, object], *, routing_key: str = "") -> Answer:
        """The raw answer to a sampling request, however long it takes; raises one of ``TRANSPORT_ERRORS``.

        ``routing_key``: requests with the same one belong on one server, if this is a router.
        """
        content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = self._data_headers
        if routing_key:
            headers = headers | {"X-SMG-Routing-Key": routing_key}
        return await self._client.submit(self._generate_url, content, headers)

    async def score(self, tokens: IntArray, *, start: int, adapter: str | None, extra_key: str) -> FloatArray:
        """(T - start,) log-probabilities of ``tokens[start:]`` as a prompt, at temperature 1; ``start`` > 0."""
        request = SegmentRequest(
            trajectory_id="",
            input_ids=tokens,
            max_new_tokens=1,
            version=0,
            adapter=adapter,
            extra_key=extra_key,
        )
        # The first reported position never has a value, so the report starts one token early.
        body = generate_body(request, rid=uuid.uuid4().hex) | {"logprob_start_len": start - 1}
        reply = await self._post("/generate", body, headers=self._data_headers, within_s=self._long_s)
        with self._reading("/generate"):
            return scored(reply, tokens[start:].tolist())

    @contextmanager
    def _reading(self, route: str) -> Generator[None, None, None]:
        """A reply that is wrong is one of this server."""
        try:
            yield
        except ProtocolError as error:
            raise ProtocolError(f"{self.url}{route}: {error}") from error

    async def _get(self, route: str) -> Mapping[str, Any]:
        return self._object(route, await self._send("GET", route, None, headers=self._data_headers))

    async def _post(
        self,
        route: str,
        body: Mapping[str, object],
        *,
        headers: Mapping[str, str] | None = None,
        within_s: float = _QUICK_S,
    ) -> Mapping[str, Any]:
        content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        reply = await self._send("POST", route, content, headers=headers or self._admin_headers, within_s=within_s)
        return self._object(route, reply)

    async def _post_large(self, route: str, body: Mapping[str, object]) -> None:
        """Writing hundreds of megabytes as JSON would hold the loop."""
        content = await anyio.to_thread.run_sync(orjson.dumps, body, limiter=self._encoders)
        with self.clock.held():
            reply = await self._send("POST", route, content, headers=self._admin_headers, within_s=self._long_s)
        self._object(route, reply)

    async def _tell(self, route: str, body: Mapping[str, object], *, within_s: float = _QUICK_S) -> None:
        """POST where the answer is plain text or nothing."""
        await self._send("POST", route, orjson.dumps(body), headers=self._admin_headers, within_s=within_s)

    async def _send(
        self,
        method: str,
        route: str,
        content: bytes | None,
        *,
        headers: Mapping[str, str],
        within_s: float = _QUICK_S,
    ) -> bytes:
        send = partial(self._client.request, method, self.url + route, content=content, headers=headers)
        started = anyio.current_time()
        number = next(self._numbers)
        self.calls[number] = started, route
        try:
            with anyio.fail_after(within_s):
                try:
                    response = await send()
                except TRANSPORT_ERRORS as error:
                    if not was_stale(error, since=started):
                        raise
                    response = await send()
        except TimeoutError as error:
            raise ServerUnavailable(f"{self.url}{route} did not answer within {within_s:g} s") from error
        except TRANSPORT_ERRORS as error:
            raise ServerUnavailable(f"{self.url}{route}: {type(error).__name__} {error}") from error
        finally:
            del self.calls[number]
        if response.status_code != 200:
            kind = ServerUnavailable if response.status_code >= 500 else RequestRefused
            raise kind(f"{self.url}{route}: {error_text(response.status_code, response.content)}")
        return response.content

    def _object(self, route: str, content: bytes) -> Mapping[str, Any]:
        """The reply, if it is a JSON object that does not say that it failed."""
        try:
            reply = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise ProtocolError(f"{self.url}{route} answered no JSON: {shown(content)}") from error
        if not isinstance(reply, Mapping):
            raise ProtocolError(f"{self.url}{route} answered {shown(reply)} instead of an object")
        success = reply.get("success", True)
        if success is not True:
            reason = reply.get("error_message") or reply.get("message") or f"success is {shown(success)}"
            raise RequestRefused(f"{self.url}{route} says that it did not succeed: {shown(reason)}")
        return reply


async def ask(server: ServerControl, *, allow_version: bool) -> Served:
    """Ask ``server``. Raises ``SamplingError`` if it does not answer, ``ConfigError`` for a version not known to work.

    ``allow_version``: take any version.
    """
    label = await server.weight_label()
    info = await server.server_info()
    told = info.get("version")
    version = told if isinstance(told, str) else shown(told)
    if version not in KNOWN_VERSIONS and not allow_version:
        raise ConfigError(
            f"the server at {server.url} is of version {version!r}; known to work are {', '.join(KNOWN_VERSIONS)}: "
            "use one of these, or SGLang(.., allow_version=True) if you have checked yours"
        )
    try:
        return Served(version=version, context_tokens=context_of(info), label=label)
    except ProtocolError as error:
        raise ProtocolError(f"{server.url}/server_info: {error}") from error


def _bearer(key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return headers if key is None else headers | {"Authorization": f"Bearer {key}"}
