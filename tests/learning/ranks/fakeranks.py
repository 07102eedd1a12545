"""Stand-ins for ranks: scripted answers over a socket pair in this process, no torch and no processes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.abc
import numpy as np
from anyio.streams.stapled import StapledByteStream

from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.modelhost import ModelOptions
from asyncrl.learning.ranks.client import Connection, RanksHost
from asyncrl.learning.ranks.frames import Frame
from asyncrl.learning.ranks.values import any_class, pack, unpack

__all__ = ["OPTIONS", "Answer", "FakeRanks", "answered", "opened", "sequence"]

OPTIONS = ModelOptions(path=Path("/nowhere"), adapter=None, options={})
Answer: TypeAlias = Callable[[Connection, dict[str, Any]], Awaitable[None]]
"""What rank 0 does about a call with these arguments."""


def sequence(*tokens: int) -> TrainingSequence:
    """All but the first token are trained."""
    count = len(tokens)
    return TrainingSequence(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.full(count, -1.0, dtype=np.float32),
        mask=np.arange(count) > 0,
        ages=np.zeros(count, dtype=np.int32),
        advantage=1.0,
        weight=1.0,
    )


def answered(result: object) -> Answer:
    """Answers with ``result``."""

    async def answer(connection: Connection, arguments: dict[str, Any]) -> None:
        values, arrays = pack("result", result)
        await connection.send(Frame.of({"result": values}, arrays))

    return answer


@dataclass
class _Link:
    connection: Connection
    words: str
    done: anyio.Event

    async def ended(self) -> None:
        """When the stand-in has."""
        await self.done.wait()

    async def last_words(self) -> str:
        return self.words


@dataclass
class FakeRanks:
    """Answers the calls after ``open`` with ``script``, in order; then it ends."""

    script: Sequence[Answer]
    tasks: anyio.abc.TaskGroup
    words: str = "it printed nothing"
    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Methods and arguments of all calls, as they came."""

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[_Link, None]:
        """A connection to the stand-in, which ends with the block."""
        here, there = _pair()
        done = anyio.Event()
        self.tasks.start_soon(self._serve, there, done)
        async with here:
            yield _Link(connection=Connection(here), words=self.words, done=done)

    async def _serve(self, stream: anyio.abc.ByteStream, done: anyio.Event) -> None:
        connection = Connection(stream)
        async with stream:
            for answer in (answered(None), *self.script, answered(None)):
                try:
                    frame = await connection.receive()
                except (anyio.IncompleteRead, anyio.ClosedResourceError):
                    return
                arguments = unpack(frame.header.get("arguments", {"$": "map", "value": {}}), frame.arrays(), any_class)
                self.heard.append((frame.header["method"], arguments))
                if frame.header["method"] == "close":
                    done.set()
                    return
                await answer(connection, arguments)


@asynccontextmanager
async def opened(
    *script: Answer, words: str = "", silence_s: float = 60.0
) -> AsyncGenerator[tuple[RanksHost, FakeRanks], None]:
    """A host that is open, and closed at the end, with the ranks behind it."""
    async with anyio.create_task_group() as tasks:
        ranks = FakeRanks(script, tasks, words)
        host = RanksHost(OPTIONS, ranks, silence_s=silence_s)
        await host.open()
        yield host, ranks
        await host.close()
        tasks.cancel_scope.cancel()


class _Bytes(anyio.abc.ByteReceiveStream):
    """A memory stream of pieces, as a stream of bytes."""

    def __init__(self, pieces: Any) -> None:
        self._pieces = pieces

    async def receive(self, max_bytes: int = 65536) -> bytes:
        piece: bytes = await self._pieces.receive()
        return piece

    async def aclose(self) -> None:
        await self._pieces.aclose()


class _Pieces(anyio.abc.ByteSendStream):
    """The other end of it."""

    def __init__(self, pieces: Any) -> None:
        self._pieces = pieces

    async def send(self, item: bytes) -> None:
        await self._pieces.send(item)

    async def aclose(self) -> None:
        await self._pieces.aclose()


def _pair() -> tuple[anyio.abc.ByteStream, anyio.abc.ByteStream]:
    # One piece at a time: whoever sends waits for the other to read.
    ways = [anyio.create_memory_object_stream[bytes](1) for _ in range(2)]
    (send_a, receive_a), (send_b, receive_b) = ways
    return (
        StapledByteStream(_Pieces(send_a), _Bytes(receive_b)),
        StapledByteStream(_Pieces(send_b), _Bytes(receive_a)),
    )
