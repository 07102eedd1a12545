"""One real SGLang server for all tests of a session: each start costs half a minute."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from asyncrl.learning.options import LoraConfig
from asyncrl.learning.torch_learner import TorchLearner
from asyncrl.sampling.sglang import SGLang
from asyncrl.servers.sglangcommand import SGLangOptions
from asyncrl.servers.sglangserver import SGLangServer

__all__ = ["RealServer", "learning", "sampling", "sglang_server"]

LORA_RANK = 16
LORAS_PER_BATCH = 4
MAX_RUNNING_REQUESTS = 8
CONTEXT_LENGTH = 2048
# As many requests that fill their context fit: SGLang runs no more than its memory would hold to their ends.
MAX_TOTAL_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class RealServer:
    """A server that runs, and what it was started with."""

    url: str
    model: Path
    log: Path
    lora_rank: int = LORA_RANK
    max_running_requests: int = MAX_RUNNING_REQUESTS
    context_length: int = CONTEXT_LENGTH
    max_total_tokens: int = MAX_TOTAL_TOKENS


@asynccontextmanager
async def sampling(server: RealServer) -> AsyncGenerator[SGLang, None]:
    """The server with its own weights, which it has again afterwards."""
    sampler = SGLang([server.url], retries=0)
    async with sampler.opened():
        (control,) = sampler.live
        try:
            yield sampler
        finally:
            with anyio.CancelScope(shield=True):
                await control.update_from_disk(server.model, "default")
                await control.flush()
                for name in await control.adapters():
                    await control.unload_adapter(name)


@asynccontextmanager
async def learning(model: Path, lora: LoraConfig | None = None) -> AsyncGenerator[TorchLearner, None]:
    """A learner of the model that the server has."""
    learner = TorchLearner(model, lora=lora, threads=1)
    await learner.open()
    try:
        yield learner
    finally:
        await learner.close()


@contextmanager
def held_open(server: SGLangServer) -> Iterator[str]:
    """``server`` in a thread with a loop of its own, for fixtures that outlive the loops of the tests."""
    started = threading.Event()
    failures: list[BaseException] = []
    stop: list[Callable[[], None]] = []

    async def hold() -> None:
        over = anyio.Event()
        token = anyio.lowlevel.current_token()
        stop.append(lambda: anyio.from_thread.run_sync(over.set, token=token))
        async with server.opened():
            started.set()
            await over.wait()

    def run() -> None:
        try:
            anyio.run(hold)
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="sglang-server")
    thread.start()
    started.wait()
    try:
        if failures:
            raise failures[0]
        yield server.url
    finally:
        if not failures:
            stop[0]()
        thread.join()


@pytest.fixture(scope="session")
def sglang_server(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A real SGLang server with the tiny Qwen3 and adapters up to rank 16."""
    # SGLang on a CPU widens this size to a multiple of 64, and dies of an adapter that is not widened too.
    model = tiny_model("qwen3", seed=0, intermediate_size=64, max_position_embeddings=CONTEXT_LENGTH)
    options = SGLangOptions(
        model=model,
        device="cpu",
        lora=LoraConfig(r=LORA_RANK),
        max_loras_per_batch=LORAS_PER_BATCH,
        context_length=CONTEXT_LENGTH,
        max_running_requests=MAX_RUNNING_REQUESTS,
        max_total_tokens=MAX_TOTAL_TOKENS,
    )
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with held_open(SGLangServer(options, log=log)) as url:
        yield RealServer(url=url, model=model, log=log)
