"""The embedded server and its engine, with tiny models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from asyncrl.servers.embedded.engine import Engine
    from asyncrl.servers.embedded.request import Request


@pytest.fixture(scope="session")
def make_engine(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    """An engine with nothing to do: ``make_engine("qwen3", slots=64)``."""
    import torch
    from transformers import AutoTokenizer

    from asyncrl.servers.embedded.engine import Engine
    from asyncrl.servers.embedded.model import DecoderModel

    torch.set_num_threads(1)

    def make(family: str = "qwen3", *, slots: int = 4096, max_running_requests: int = 64) -> Engine:
        path = tiny_model(family)
        model = DecoderModel(path, dtype=torch.float32, device=torch.device("cpu"), slots=slots)
        tokenizer = AutoTokenizer.from_pretrained(path)
        return Engine(model, tokenizer, max_running_requests=max_running_requests, random_seed=0)

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """A request as the service makes it: ``make_request([3, 4], max_new_tokens=5, extra_key="x")``."""
    from array import array

    from asyncrl.servers.embedded.request import Request
    from asyncrl.servers.wireserver import parse_generate

    outer = ("rid", "logprob_start_len", "extra_key", "cache_salt")

    def make(tokens: Sequence[int], *, adapter: Any = None, stop_ids: Sequence[int] = (), **options: Any) -> Request:
        params = {key: value for key, value in options.items() if key not in outer}
        body = {key: value for key, value in options.items() if key in outer}
        body |= {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True}
        wire = parse_generate(body)
        assert wire.max_new_tokens is not None
        return Request(
            wire=wire,
            adapter=adapter,
            max_new_tokens=wire.max_new_tokens,
            stop_ids=frozenset(stop_ids),
            tokens=array("q", tokens),
        )

    return make


Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def serving(tiny_model: Callable[..., Path]) -> Serving:
    """The embedded server in this process, and a client of it: ``async with serving(api_key="x") as client``."""
    import asyncrl.servers.embedded.loading  # noqa: F401  takes seconds, which belong to no test
    from asyncrl.servers.embedded.app import create_app
    from asyncrl.servers.embedded.options import ServerOptions

    @asynccontextmanager
    async def open_server(**changes: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
        options: dict[str, Any] = {"model": tiny_model(), "max_total_tokens": 20_000} | changes
        app = create_app(ServerOptions(**options))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://embedded") as client,
        ):
            yield client

    return open_server
