"""Calls to an embedded server in this process, and waiting for what it does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import anyio.lowlevel
import httpx

Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]
LONG = 15_000
# Tokens of a request that is still running when the test is done with it.


def body(tokens: list[int], *, new: int = 4, rid: str | None = None, **options: Any) -> dict[str, Any]:
    """A /generate body that no end-of-sequence token ends."""
    params = {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": 1}
    return {"rid": rid, "input_ids": tokens, "sampling_params": params, "return_logprob": True} | options


async def post(client: httpx.AsyncClient, route: str, status: int = 200, **content: Any) -> Any:
    """POST and expect ``status``; the reply's JSON."""
    response = await client.post(route, json=content)
    assert response.status_code == status, response.text
    return response.json() if response.headers.get("content-type") == "application/json" else response.text


async def load(client: httpx.AsyncClient) -> Mapping[str, int]:
    """The server's load."""
    found: Mapping[str, int] = (await client.get("/v1/loads")).json()["loads"][0]
    return found


async def until(client: httpx.AsyncClient, condition: Callable[[Mapping[str, int]], bool]) -> Mapping[str, int]:
    """Ask for the load until ``condition`` holds: the only way from outside to see a request run."""
    while not condition(found := await load(client)):
        await anyio.lowlevel.checkpoint()
    return found


async def until_running(client: httpx.AsyncClient, requests: int = 1) -> None:
    """Until that many requests run."""
    await until(client, lambda found: found["num_running_reqs"] == requests)


async def until_progress(client: httpx.AsyncClient) -> None:
    """Until a request that runs has a token, and computes another one."""
    before = (await load(client))["num_used_tokens"]
    await until(client, lambda found: found["num_used_tokens"] > before)


class Call:
    """A request in the background; ``reply`` is its answer, once there is one."""

    def __init__(self, client: httpx.AsyncClient, content: dict[str, Any]) -> None:
        self._client = client
        self._content = content
        self.reply: Any = None
        self.scope = anyio.CancelScope()

    async def __call__(self) -> None:
        with self.scope:
            self.reply = await post(self._client, "/generate", **self._content)

    @property
    def meta(self) -> Any:
        """What the reply says about itself."""
        return self.reply["meta_info"]
