"""The control plane of one sampling server: adapters, weights, pauses, and scoring of fixed tokens.

Every call checks the status and the reply's ``success``. Quick ones have a deadline; those that load weights or wait
for requests end when they end, and the caller brings a cancel scope. Leaves out which servers to call, and when.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import orjson

from asyncrl.errors import ProtocolError, RequestRefused, SamplingError, ServerUnavailable
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.transport import TRANSPORT_ERRORS
from asyncrl.sampling.wire import PauseMode, error_text, generate_body
from asyncrl.types import FloatArray, IntArray

__all__ = ["ServerControl"]

_QUICK_S = 30.0
_ABORT_S = 5.0


class ServerControl:
    """One server. ``admin_key`` opens the control routes where it differs from ``api_key``."""

    def __init__(self, client: httpx.AsyncClient, url: str, *, api_key: str | None, admin_key: str | None) -> None:
        self.url = url
        self._client = client
        self._data_headers = _bearer(api_key)
        self._admin_headers = _bearer(admin_key or api_key)

    async def model_info(self) -> Mapping[str, Any]:
        """What the server says about its model."""
        return await self._get("/model_info")

    async def server_info(self) -> Mapping[str, Any]:
        """Resolved options and software version; slow while the server is busy."""
        return await self._get("/server_info")

    async def loads(self) -> Mapping[str, Any]:
        """Running and waiting requests and memory in use; quick, also while the server is busy."""
        return await self._get("/v1/loads")

    async def weight_label(self) -> str:
        """The label of the base weights that the server holds; ours are policy versions in decimal."""
        return str((await self.model_info()).get("weight_version"))

    async def adapters(self) -> set[str]:
        """Names of the loaded LoRA adapters."""
        models = (await self._get("/v1/models")).get("data", [])
        return {str(model["id"]) for model in models if model.get("parent")}

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the PEFT folder ``path``, readable by the server, as ``name``. A name in use is refused."""
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, within_s=math.inf)

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter. Returns when the last request that uses it has ended, which may be never."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, within_s=math.inf)

    async def update_from_disk(self, path: Path, label: str) -> None:
        """Replace the base weights by the model folder ``path``. The prefix cache is left as it is: see ``flush``."""
        # Flushing in the same call is refused while anything runs, after the weights were replaced all the same.
        body = {"model_path": str(path), "weight_version": label, "flush_cache": False}
        await self._post("/update_weights_from_disk", body, within_s=math.inf)

    async def pause(self, mode: PauseMode) -> None:
        """Stop computing; new requests wait at the server until ``continue_``."""
        # In mode "abort" the server answers only when every request has ended.
        await self._post("/pause_generation", {"mode": mode}, within_s=math.inf)

    async def continue_(self) -> None:
        """Go on after ``pause``."""
        await self._post("/continue_generation", {})

    async def flush(self) -> None:
        """Forget the prefix cache; refused while requests run or are frozen in place."""
        await self._post("/flush_cache", {})

    async def abort(self, rid: str) -> None:
        """Try to end one request; never raises for the server's faults, for there is nothing left to do about it."""
        try:
            await self._post("/abort_request", {"rid": rid}, within_s=_ABORT_S)
        except SamplingError:
            return

    async def generate(self, body: Mapping[str, object]) -> httpx.Response:
        """The raw answer to a sampling request, however long it takes; raises one of ``TRANSPORT_ERRORS``."""
        content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return await self._client.post(self.url + "/generate", content=content, headers=self._data_headers)

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
        reply = await self._post("/generate", body, headers=self._data_headers, within_s=math.inf)
        try:
            entries = reply["meta_info"]["input_token_logprobs"][1:]
            logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
            ids = [entry[1] for entry in entries]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ProtocolError(f"{self.url} did not score a prompt: {error!r}") from error
        if ids != tokens[start:].tolist():
            raise ProtocolError(f"{self.url} scored other tokens than it was sent: {ids}")
        return logprobs

    async def _get(self, route: str) -> Mapping[str, Any]:
        reply = await self._call("GET", route, None, headers=self._data_headers, within_s=_QUICK_S)
        if not isinstance(reply, Mapping):
            raise ProtocolError(f"{self.url}{route} answered {reply!r} instead of an object")
        return reply

    async def _post(
        self,
        route: str,
        body: Mapping[str, object],
        *,
        headers: Mapping[str, str] | None = None,
        within_s: float = _QUICK_S,
    ) -> Any:
        return await self._call("POST", route, body, headers=headers or self._admin_headers, within_s=within_s)

    async def _call(self, method: str, route: str, body: object, *, headers: Mapping[str, str], within_s: float) -> Any:
        content = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            with anyio.fail_after(within_s):
                response = await self._client.request(method, self.url + route, content=content, headers=headers)
        except TimeoutError as error:
            raise ServerUnavailable(f"{self.url}{route} did not answer within {within_s:g} s") from error
        except TRANSPORT_ERRORS as error:
            raise ServerUnavailable(f"{self.url}{route}: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            kind = ServerUnavailable if response.status_code >= 500 else RequestRefused
            raise kind(f"{self.url}{route}: {error_text(response.status_code, response.content)}")
        reply = _parse(response.content)
        if isinstance(reply, Mapping) and reply.get("success") is False:
            reason = reply.get("error_message") or reply.get("message") or "no reason given"
            raise RequestRefused(f"{self.url}{route} says that it did not succeed: {reason}")
        return reply


def _bearer(key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return headers if key is None else headers | {"Authorization": f"Bearer {key}"}


def _parse(content: bytes) -> Any:
    """The reply as JSON; flushes and aborts answer in plain text or with nothing."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
