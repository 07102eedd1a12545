"""The three servers, each up for the whole session and reached over a socket, and the count of cases at the end."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import pytest_asyncio
import uvicorn

from asyncrl.types import FloatArray
from tests.conformance.differences import DIFFERENCES
from tests.conformance.subject import Kind, Served, Subject
from tests.realserver import CONTEXT_LENGTH, MAX_RUNNING_REQUESTS, MAX_TOTAL_TOKENS, RealServer

KINDS: tuple[Kind, ...] = ("scripted", "embedded", "sglang")
MARKS: Mapping[Kind, Sequence[pytest.MarkDecorator]] = {
    "scripted": (),
    "embedded": (pytest.mark.slow,),
    # The first case waits for the server.
    "sglang": (pytest.mark.sglang, pytest.mark.timeout(400)),
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PACE_S = 0.004
_PREFIX = "tests/conformance/"


@contextmanager
def served_by_uvicorn(app: Any, lifespan: AbstractAsyncContextManager[Any]) -> Iterator[str]:
    """``app`` in a thread with a loop of its own, because the tests' loops end with them."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=5, ws="none")
    )
    failures: list[BaseException] = []
    up = threading.Event()

    async def serve() -> None:
        async with lifespan:
            up.set()
            await server.serve(sockets=[listener])

    def run() -> None:
        try:
            anyio.run(serve)
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            failures.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=run, name="conformance-server")
    thread.start()
    up.wait()
    try:
        assert not failures, failures
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def scripted_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A scripted server, over a socket like the others."""
    from asyncrl.testing.server import GenerateCall, ScriptedLimits, ScriptedServer
    from asyncrl.testing.theta import VOCABULARY, read_theta, theta_distribution, write_theta

    folders = [tmp_path_factory.mktemp("theta") for _ in range(4)]
    for folder, theta in zip(folders, (0.0, 0.5, 1.0, -1.0), strict=True):
        write_theta(folder, theta)

    def logits(path: Path, ids: Sequence[int], adapter: Path | None) -> FloatArray:
        return np.tile(theta_distribution(read_theta(adapter or path)), (len(ids), 1))

    def pace(call: GenerateCall) -> float:
        return PACE_S * float(call.sampling_params.get("max_new_tokens") or 0)

    limits = ScriptedLimits(
        context_length=CONTEXT_LENGTH,
        max_total_tokens=MAX_TOTAL_TOKENS,
        max_running_requests=MAX_RUNNING_REQUESTS,
        vocab_size=VOCABULARY,
    )
    eos = [int(token) for token in np.argsort(-theta_distribution(0.0))[:8]]
    with served_by_uvicorn(ScriptedServer(seconds=pace, eos=eos, limits=limits), nullcontext()) as url:
        yield Served(
            kind="scripted",
            url=url,
            weights=(folders[0], folders[1]),
            adapters=(folders[2], folders[3]),
            vocabulary=VOCABULARY,
            context_length=CONTEXT_LENGTH,
            max_total_tokens=MAX_TOTAL_TOKENS,
            max_running_requests=MAX_RUNNING_REQUESTS,
            logits=logits,
            tensors=lambda path: {f"theta:{read_theta(path)}": np.zeros(1, dtype=np.float32)},
        )


Folders = tuple[tuple[Path, Path], tuple[Path, Path]]


@pytest.fixture(scope="session")
def folders(tiny_model: Callable[..., Path], tiny_adapter: Callable[..., Path]) -> Folders:
    """Two models and two adapters. SGLang on a CPU widens the feed-forward layer unless it is a multiple of 64."""
    sizes = {"intermediate_size": 64, "max_position_embeddings": CONTEXT_LENGTH}
    models = [tiny_model("qwen3", seed=seed, **sizes) for seed in (0, 1)]
    adapters = [tiny_adapter("qwen3", seed=seed, target_modules=ATTENTION) for seed in (0, 1)]
    return (models[0], models[1]), (adapters[0], adapters[1])


def _served(kind: Kind, url: str, folders: Folders, reference: Callable[..., Any]) -> Served:
    from safetensors.torch import load_file

    def logits(path: Path, ids: Sequence[int], adapter: Path | None) -> FloatArray:
        found: FloatArray = reference(path, ids, adapter).numpy()
        return found

    def tensors(path: Path) -> Mapping[str, Any]:
        found: Mapping[str, Any] = load_file(path / "model.safetensors")
        return found

    return Served(
        kind=kind,
        url=url,
        weights=folders[0],
        adapters=folders[1],
        vocabulary=64,
        context_length=CONTEXT_LENGTH,
        max_total_tokens=MAX_TOTAL_TOKENS,
        max_running_requests=MAX_RUNNING_REQUESTS,
        logits=logits,
        tensors=tensors,
    )


@pytest.fixture(scope="session")
def embedded_served(folders: Folders, reference: Callable[..., Any]) -> Iterator[Served]:
    """The embedded server."""
    from asyncrl.servers.embedded.app import create_app
    from asyncrl.servers.embedded.options import ServerOptions

    app = create_app(
        ServerOptions(
            model=folders[0][0],
            context_length=CONTEXT_LENGTH,
            max_total_tokens=MAX_TOTAL_TOKENS,
            max_running_requests=MAX_RUNNING_REQUESTS,
        )
    )
    with served_by_uvicorn(app, app.router.lifespan_context(app)) as url:
        yield _served("embedded", url, folders, reference)


@pytest.fixture(scope="session")
def sglang_served(sglang_server: RealServer, folders: Folders, reference: Callable[..., Any]) -> Served:
    """The real server."""
    assert sglang_server.model == folders[0][0]
    return _served("sglang", sglang_server.url, folders, reference)


@pytest.fixture(params=[pytest.param(kind, marks=MARKS[kind]) for kind in KINDS])
def served(request: pytest.FixtureRequest) -> Served:
    """Each of the servers."""
    found: Served = request.getfixturevalue(f"{request.param}_served")
    return found


@pytest_asyncio.fixture
async def subject(served: Served, request: pytest.FixtureRequest) -> AsyncGenerator[Subject, None]:
    """A server, in the state in which every case finds it and has to leave it."""
    case = getattr(request.node, "originalname", request.node.name)
    checks = [entry.check for entry in DIFFERENCES if (entry.kind, entry.case) == (served.kind, case)]
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=limits, trust_env=False) as client:
        subject = Subject(served, client, checks[0] if checks else None)
        yield subject
        await subject.reset()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many cases each server passed, and how many of them by a difference that is listed."""
    listed = {(entry.kind, entry.case) for entry in DIFFERENCES}
    cases, differences, failed = Counter[str](), Counter[str](), Counter[str]()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            nodeid = str(report.nodeid)
            kinds = [kind for kind in KINDS if f"[{kind}" in nodeid or f"-{kind}" in nodeid]
            if not nodeid.startswith(_PREFIX) or report.when != "call" or not kinds:
                continue
            case = nodeid.rpartition("::")[2].partition("[")[0]
            cases[kinds[0]] += 1
            differences[kinds[0]] += (kinds[0], case) in listed
            failed[kinds[0]] += outcome == "failed"
    for kind in cases:
        terminalreporter.write_line(
            f"conformance of {kind}: {cases[kind]} cases, {differences[kind]} of them listed differences, "
            f"{failed[kind]} failed"
        )
