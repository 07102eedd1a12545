"""What does one sampled segment cost in CPU between the engine and the socket, and does that grow with concurrency?

``SGLang.sample`` (checks, choice of a server, body, HTTP, parsing and checking the reply) beside bare aiohttp that
sends the same bytes to the same server and only decodes the reply. The server is a process of its own that keeps as
many requests as asked for in flight: it answers the oldest when the last one has come, or so many in a second. CPU is
that of this process. The loop's lag is measured at a steady rate of answers: in a burst it is only their sum.
Prints one JSON line for each question.

    uv run python benchmarks/transport.py
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import numpy as np
import orjson

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.sampling.base import SegmentRequest  # noqa: E402  found by the line above
from asyncrl.sampling.sglang import SGLang  # noqa: E402
from asyncrl.sampling.wire import generate_body  # noqa: E402
from benchmarks.answer import Answer  # noqa: E402

CONCURRENCY = (256, 1024, 4096, 10_000)
PROMPT_TOKENS = 512
REPLY_TOKENS = (200, 500)
ROUNDS = 3
"""Requests of each place in flight: the first opens its connection, the others use it again."""
MOST_MS, FLAT_WITHIN, MOST_OF_AIOHTTP, MOST_LAG_MS = 1.5, 1.5, 3.0, 50.0
_TICK_S = 0.01
_PACE_S = 0.01
_RATE = 300
_LAG_S = 4.0
_LEAST_REQUESTS = 3072


class HoldingServer:
    """The ASGI application of the server's process. ``/hold``: how many requests to keep, until how many have come.

    With a rate, that many are answered in a second once so many are kept.
    """

    def __init__(self) -> None:
        self._held: list[anyio.Event] = []
        self._keep = self._left = self._rate = 0
        self._pacing = False
        self._replies = [_reply(tokens) for tokens in range(*REPLY_TOKENS, 10)]
        self._served = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        content = b"{}"
        if path == "/hold":
            order = orjson.loads(body)
            self._keep, self._left, self._rate = order["keep"], order["total"], order["rate"]
        elif path == "/generate":
            await self._turn()
            self._served += 1
            content = self._replies[self._served % len(self._replies)]
        elif path == "/v1/loads":
            content = b'{"loads":[{"num_running_reqs":0,"num_waiting_reqs":0}]}'
        elif path == "/server_info":
            content = b'{"version":"scripted"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _turn(self) -> None:
        mine = anyio.Event()
        self._held.append(mine)
        self._left -= 1
        if self._left <= 0:
            released, self._held = self._held, []
        elif self._rate:
            released = []
            if len(self._held) >= self._keep and not self._pacing:
                self._pacing = True
                self._pace()
        elif len(self._held) >= self._keep:
            # Some at a time, as an engine's step ends some requests.
            some = max(1, self._keep // 64)
            released, self._held = self._held[:some], self._held[some:]
        else:
            released = []
        for event in released:
            event.set()
        await mine.wait()

    def _pace(self) -> None:
        due = max(1, round(self._rate * _PACE_S))
        released, self._held = self._held[:due], self._held[due:]
        for event in released:
            event.set()
        self._pacing = bool(self._rate)
        if self._pacing:
            asyncio.get_running_loop().call_later(_PACE_S, self._pace)


def _reply(tokens: int) -> bytes:
    rng = random.Random(tokens)
    ids = [rng.randrange(150_000) for _ in range(tokens)]
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
        "input_token_logprobs": [],
        "output_token_logprobs": [[-rng.expovariate(1.0), token, None] for token in ids],
        "output_token_logprobs_length": tokens,
    }
    return orjson.dumps({"text": "x" * tokens * 4, "output_ids": ids, "meta_info": meta})


def serve(port: int) -> None:
    """The server's process."""
    import uvicorn

    config = uvicorn.Config(
        HoldingServer(), host="127.0.0.1", port=port, log_level="critical", lifespan="off", backlog=4096
    )
    uvicorn.Server(config).run()


@contextmanager
def _server(port: int) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", str(port)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()  # at once: it waits for nothing that is worth it


def _request(key: int) -> SegmentRequest:
    rng = np.random.default_rng(key)
    return SegmentRequest(
        trajectory_id=str(key),
        input_ids=rng.integers(0, 150_000, PROMPT_TOKENS, dtype=np.int32),
        max_new_tokens=512,
        version=0,
        extra_key="v0",
        seed=key,
    )


Ask = Callable[[SegmentRequest], Awaitable[object]]


@asynccontextmanager
async def _ours(url: str) -> AsyncGenerator[Ask, None]:
    async with SGLang([url]).opened() as sampler:
        yield sampler.sample


@asynccontextmanager
async def _bare(url: str) -> AsyncGenerator[Ask, None]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def ask(request: SegmentRequest) -> object:
            body = generate_body(request, rid="0" * 32)
            content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
            async with session.post(url + "/generate", data=content, headers=headers) as response:
                return orjson.loads(await response.read())

        yield ask


async def _hold(url: str, *, keep: int, total: int, rate: int = 0) -> None:
    content = orjson.dumps({"keep": keep, "total": total, "rate": rate})
    async with aiohttp.ClientSession() as session, session.post(url + "/hold", data=content) as response:
        await response.read()


async def _cpu_ms(url: str, opened: Callable[[str], Any], concurrency: int) -> float:
    """``ROUNDS`` requests from each of ``concurrency`` tasks; small ones are repeated, on new connections each time."""
    requests = [_request(key) for key in range(min(concurrency, 512))]
    repeats = max(1, _LEAST_REQUESTS // (concurrency * ROUNDS))
    cpu_s = 0.0
    for _ in range(repeats):
        async with opened(url) as ask:
            await _hold(url, keep=concurrency, total=concurrency * ROUNDS)

            async def work(index: int, ask: Ask = ask) -> None:
                for number in range(ROUNDS):
                    await ask(requests[(index + number) % len(requests)])

            started = time.process_time()
            async with anyio.create_task_group() as tasks:
                for index in range(concurrency):
                    tasks.start_soon(work, index)
            cpu_s += time.process_time() - started
    return cpu_s / (repeats * concurrency * ROUNDS) * 1e3


async def _lag_ms(url: str, opened: Callable[[str], Any], concurrency: int) -> float:
    """The 99th percentile of how late the loop is, with so many in flight and ``_RATE`` answers a second."""
    requests = [_request(key) for key in range(min(concurrency, 512))]
    answered = anyio.Event()
    lags: list[float] = []
    async with opened(url) as ask:
        await _hold(url, keep=concurrency, total=10**9, rate=_RATE)

        async def work(index: int) -> None:
            while True:
                await ask(requests[index % len(requests)])
                answered.set()

        async with anyio.create_task_group() as tasks:
            for index in range(concurrency):
                tasks.start_soon(work, index)
            await answered.wait()
            end = anyio.current_time() + _LAG_S
            while (due := anyio.current_time() + _TICK_S) < end:
                await anyio.sleep_until(due)
                lags.append(anyio.current_time() - due)
            await _hold(url, keep=0, total=0)
            tasks.cancel_scope.cancel()
        await ask(requests[0])
    lags.sort()
    return lags[int(len(lags) * 0.99)] * 1e3


async def _after_churn(url: str, concurrency: int) -> tuple[int, int]:
    """Half of ``concurrency`` requests are cancelled at random moments; how many of as many later ones succeed."""
    rng = random.Random(0)
    succeeded = 0
    async with SGLang([url]).opened() as sampler:
        await _hold(url, keep=concurrency // 2, total=10**9)

        async def hurried(index: int) -> None:
            with anyio.move_on_after(rng.uniform(0.0, 2.0) if index % 2 else None):
                await sampler.sample(_request(index))

        async with anyio.create_task_group() as tasks:
            for index in range(concurrency):
                tasks.start_soon(hurried, index)
            await anyio.sleep(4.0)
            await _hold(url, keep=0, total=0)
            # One more request makes the server look, and let go of what it holds.
            await sampler.sample(_request(0))

        async def later(index: int) -> None:
            nonlocal succeeded
            await sampler.sample(_request(index))
            succeeded += 1

        async with anyio.create_task_group() as tasks:
            for index in range(concurrency):
                tasks.start_soon(later, index)
    return succeeded, concurrency


def answers(url: str, concurrencies: tuple[int, ...]) -> Iterator[Answer]:
    """Measure everything."""
    for opened in (_ours, _bare):
        anyio.run(_cpu_ms, url, opened, 64)  # warm up
    gc.collect()
    gc.freeze()  # as in a run: modules and classes are not looked at again, by either side's garbage collections
    smallest = smallest_bare = 0.0
    for concurrency in concurrencies:
        bare = anyio.run(_cpu_ms, url, _bare, concurrency)
        ours = anyio.run(_cpu_ms, url, _ours, concurrency)
        smallest, smallest_bare = smallest or ours, smallest_bare or bare
        yield Answer(
            question=f"CPU per segment, {concurrency} in flight",
            figure=ours,
            unit="ms",
            anchor="bare aiohttp, the same bytes",
            anchor_figure=bare,
            ratio=ours / bare,
            goal=f"at most {MOST_MS} ms and {MOST_OF_AIOHTTP:g} times aiohttp's",
            meets_goal=ours <= MOST_MS and ours <= MOST_OF_AIOHTTP * bare,
        )
        yield Answer(
            question=f"growth of CPU per segment to {concurrency} in flight",
            figure=ours,
            unit="ms",
            anchor=f"the same at {concurrencies[0]}",
            anchor_figure=smallest,
            ratio=ours / smallest,
            goal=f"at most {FLAT_WITHIN:g} times, or no more than bare aiohttp's {bare / smallest_bare:.2f} times",
            meets_goal=ours / smallest <= max(FLAT_WITHIN, bare / smallest_bare),
        )
        bare, ours = anyio.run(_lag_ms, url, _bare, concurrency), anyio.run(_lag_ms, url, _ours, concurrency)
        yield Answer(
            question=f"event-loop lag (99th percentile) at {_RATE} answers a second, {concurrency} in flight",
            figure=ours,
            unit="ms",
            anchor="bare aiohttp",
            anchor_figure=bare,
            ratio=ours / bare,
            goal=f"at most {MOST_LAG_MS:g} ms, or on a busy machine {MOST_OF_AIOHTTP:g} times aiohttp's",
            meets_goal=ours <= max(MOST_LAG_MS, MOST_OF_AIOHTTP * bare),
        )
    succeeded, asked = anyio.run(_after_churn, url, 2048)
    yield Answer(
        question="requests that succeed after half of 2048 were cancelled at random moments",
        figure=succeeded,
        unit="requests",
        anchor="requests made",
        anchor_figure=asked,
        ratio=succeeded / asked,
        goal="all",
        meets_goal=succeeded == asked,
    )


def main() -> None:
    """Print one line for each question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help="of the server; 0: any free one")
    parser.add_argument("--most", type=int, default=CONCURRENCY[-1], help="leave out higher concurrencies")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    port = arguments.port
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    with _server(port) as url:
        for answer in answers(url, tuple(each for each in CONCURRENCY if each <= arguments.most)):
            print(answer.line(), flush=True)


if __name__ == "__main__":
    main()
