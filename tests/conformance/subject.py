"""A server of any kind as the cases see it: HTTP, its sizes, and folders that it can load."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio
import httpx
import numpy as np

from asyncrl.types import FloatArray
from tests.realserver import CONTEXT_LENGTH

Kind: TypeAlias = Literal["scripted", "embedded", "sglang"]

CONTEXT = CONTEXT_LENGTH
"""Tokens of a prompt and its output, in all servers."""

LONG = 1500
"""Tokens of a request that is still running when the case is done with it."""

_LOOK_S = 0.01
# A server tells its load when it is asked, and in no other way.


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that is up, for all cases of a session."""

    kind: Kind
    url: str
    weights: tuple[Path, Path]
    """Folders of two versions; the server was started with the first, under the label "default"."""
    adapters: tuple[Path, Path]
    vocabulary: int
    context_length: int
    max_total_tokens: int
    max_running_requests: int
    logits: Callable[[Path, Sequence[int], Path | None], FloatArray]
    """(T, V) what the model in a folder, with the adapter in another, says after each token."""
    tensors: Callable[[Path], Mapping[str, Any]]
    """The weights in a folder."""


class Call:
    """A request in the background; ``reply`` is its answer, once there is one."""

    def __init__(self, subject: Subject, body: Mapping[str, Any]) -> None:
        self._subject = subject
        self._body = body
        self.reply: Any = None
        self.done = anyio.Event()

    async def __call__(self) -> None:
        self.reply = await self._subject.post("/generate", self._body)
        self.done.set()

    @property
    def meta(self) -> Any:
        """What the reply says about itself."""
        return self.reply["meta_info"]


class Subject:
    """A server and a client of it. ``difference``: how this server behaves in this case instead, if it does."""

    def __init__(
        self, served: Served, client: httpx.AsyncClient, difference: Callable[[Subject], Awaitable[None]] | None
    ) -> None:
        self.served = served
        self.kind = served.kind
        self.client = client
        self._difference = difference

    async def differs(self) -> bool:
        """True, after a look at what it does instead, if the table of differences has this case of this server."""
        if self._difference is None:
            return False
        await self._difference(self)
        return True

    async def post(self, route: str, body: Mapping[str, Any] | None = None, *, status: int = 200) -> Any:
        """POST and expect ``status``; the reply's JSON, or its text."""
        response = await self.client.post(route, json=dict(body or {}))
        return _read(response, status)

    async def get(self, route: str, *, status: int = 200) -> Any:
        """GET and expect ``status``."""
        return _read(await self.client.get(route), status)

    async def generate(self, ids: Sequence[int] = (5, 6, 7, 8), *, status: int = 200, **options: Any) -> Any:
        """The reply to ``body(ids, ..)``."""
        return await self.post("/generate", body(ids, **options), status=status)

    def call(self, ids: Sequence[int] = (5, 6, 7, 8), **options: Any) -> Call:
        """The same request, for a task group."""
        return Call(self, body(ids, **options))

    async def until_running(self, requests: int = 1, *, waiting: int | None = None) -> None:
        """Until that many requests run, and wait."""
        while True:
            load = (await self.get("/v1/loads"))["loads"][0]
            if load["num_running_reqs"] == requests and waiting in (None, load["num_waiting_reqs"]):
                return
            await anyio.sleep(_LOOK_S)

    async def until_tokens(self) -> None:
        """Until one request runs that has some of its tokens."""
        await self.until_running()
        await anyio.sleep(0.1)

    async def label(self) -> str:
        """The label of the weights."""
        return str((await self.get("/model_info"))["weight_version"])

    async def adapters(self) -> dict[str, str]:
        """Loaded adapters and their paths."""
        models = (await self.get("/v1/models"))["data"]
        return {model["id"]: model["root"] for model in models if model["parent"]}

    async def until_adapters(self, number: int) -> None:
        """Until so many adapters are loaded."""
        while True:
            if len(await self.adapters()) == number:
                return
            await anyio.sleep(_LOOK_S)

    async def load(self, name: str, adapter: int = 0) -> None:
        """Load one of the adapters."""
        path = str(self.served.adapters[adapter])
        await self.post("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def update(self, label: str | None, weights: int = 1, *, status: int = 200, **options: Any) -> Any:
        """Update from one of the folders."""
        options |= {} if label is None else {"weight_version": label}
        path = str(self.served.weights[weights])
        return await self.post("/update_weights_from_disk", {"model_path": path} | options, status=status)

    @asynccontextmanager
    async def paused(self, mode: str) -> AsyncGenerator[None, None]:
        """A pause, always ended."""
        await self.post("/pause_generation", {"mode": mode})
        try:
            yield
        finally:
            await self.post("/continue_generation")

    def logprobs(
        self,
        ids: Sequence[int],
        start: int,
        *,
        temperature: float = 1.0,
        weights: int = 0,
        adapter: int | None = None,
    ) -> FloatArray:
        """(T - start,) what the tokens from ``start`` on should have."""
        folder = None if adapter is None else self.served.adapters[adapter]
        logits = self.served.logits(self.served.weights[weights], ids, folder)[start - 1 : -1] / temperature
        shifted = logits - logits.max(axis=-1, keepdims=True)
        scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        chosen: FloatArray = scores[np.arange(len(scores)), list(ids[start:])]
        return chosen

    async def reset(self) -> None:
        """Whatever the case left: nothing runs, nothing is paused, the first weights, no adapters, no cache."""
        await self.client.post("/continue_generation", json={})
        await self.post("/abort_request", {"abort_all": True})
        await self.until_running(0, waiting=0)
        await self.client.post("/end_weight_update", json={})
        for name in await self.adapters():
            await self.post("/unload_lora_adapter", {"lora_name": name})
        await self.update("default", weights=0)


def body(
    ids: Sequence[int] = (5, 6, 7, 8), *, sampling: Mapping[str, Any] | None = None, new: int = 4, **options: Any
) -> dict[str, Any]:
    """A /generate body that no end-of-sequence token ends."""
    params = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True} | dict(sampling or {})
    return {"input_ids": list(ids), "sampling_params": params, "return_logprob": True} | options


def outputs(reply: Mapping[str, Any]) -> list[float]:
    """The output log-probabilities, after a look at whether the reply agrees with itself."""
    meta, ids = reply["meta_info"], reply["output_ids"]
    triples = meta["output_token_logprobs"]
    assert len(ids) == meta["completion_tokens"] == len(triples) == meta["output_token_logprobs_length"]
    assert [triple[1] for triple in triples] == ids
    spans = meta["weight_versions"]
    assert [span["start"] for span in spans] == [0, *[span["end"] for span in spans[:-1]]]
    assert spans[-1]["end"] == len(ids)
    assert spans[-1]["version"] == meta["weight_version"]
    return [triple[0] for triple in triples]


def _read(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, f"{response.status_code} instead of {status}: {response.text[:500]}"
    return response.json() if response.headers.get("content-type") == "application/json" else response.text
