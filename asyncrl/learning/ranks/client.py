"""The driver's side: calls the methods of a model that lives in ranks, over a connection to rank 0.

One call at a time, in order. The answer of ``weights`` comes parameter by parameter. While a call runs rank 0 says
every few seconds that it is there; a connection that ends or is silent for too long ends the learner with what the
ranks said, and every later call is refused at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.abc
import anyio.to_thread
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncrl import errors
from asyncrl.errors import AsyncRLError, LearnerError
from asyncrl.learning.modelhost import ModelOptions
from asyncrl.learning.ranks.frames import MOST_BYTES, PREFIX_BYTES, Frame, FrameError, lengths
from asyncrl.learning.ranks.sequences import SentSequences
from asyncrl.learning.ranks.values import own_class, pack, unpack

__all__ = ["Connection", "Link", "RanksHost", "module_paths"]

_SILENCE_S = 120.0
# Rank 0 says every 5 s that it is there, from a thread that a long call into C can hold up.
_CLOSE_S = 10.0
_LOST = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class _RankFailed(Exception):
    """What the first rank that failed has said; the others may be gone for another reason."""


class Connection:
    """Frames over a stream of bytes."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._received = BufferedByteReceiveStream(stream)

    async def send(self, frame: Frame) -> None:
        """Send the whole frame, which a cancelled caller must not leave in the middle."""
        with anyio.CancelScope(shield=True):
            await self._stream.send(await anyio.to_thread.run_sync(frame.encoded))

    async def receive(self, *, most_bytes: int = MOST_BYTES) -> Frame:
        """The next frame. Raises ``FrameError`` for what is none."""
        prefix = await self._received.receive_exactly(PREFIX_BYTES)
        header, payload = lengths(prefix, most_bytes=most_bytes)
        return Frame.decoded(
            await self._received.receive_exactly(header),
            await self._received.receive_exactly(payload) if payload else b"",
        )

    async def aclose(self) -> None:
        """End it; the other side sees the end."""
        await self._stream.aclose()


class Link(Protocol):
    """A way to rank 0 that is open. Real: ``LocalLink``, ``RemoteLink``."""

    @property
    def connection(self) -> Connection:
        """To rank 0."""
        ...

    async def ended(self) -> None:
        """Wait, for a limited time, until the ranks have ended by themselves."""
        ...

    async def last_words(self) -> str:
        """How the ranks ended, when the connection is lost. Waits for that, for a limited time."""
        ...


class RanksHost:
    """See ``ModelHost``. ``connect``: opens the way to the ranks, and ends them at its exit; it must not hold a cancel
    scope meanwhile, for it is left in another task.

    ``silence_s``: how long rank 0 may say nothing while a call runs.
    """

    def __init__(
        self,
        options: ModelOptions,
        connect: Callable[[], AbstractAsyncContextManager[Link]],
        *,
        silence_s: float = _SILENCE_S,
    ) -> None:
        self._options = options
        self._connect = connect
        self._silence_s = silence_s
        self._stack = AsyncExitStack()
        self._link: Link | None = None
        self._lock = anyio.Lock()
        self._sequences = SentSequences()
        self._is_lost = False
        self._is_closing = False

    async def open(self) -> None:
        """Start or reach the ranks and have them load the model."""
        try:
            self._link = await self._stack.enter_async_context(self._connect())
            await self.call("open", options=self._options, paths=module_paths())
        except LearnerError:
            if not self._is_closing:  # by somebody who does not wait for this
                raise

    async def close(self) -> None:
        """End the ranks: in order if they wait for a call, else at once."""
        self._is_closing = True
        link, self._link = self._link, None
        # As a call that runs has the lock until its answer, nothing is said to ranks at work; they see the end.
        if link is not None and not self._is_lost and not self._lock.locked():
            with anyio.move_on_after(_CLOSE_S, shield=True):
                try:
                    await link.connection.send(Frame(header={"method": "close"}))
                    await link.ended()
                except _LOST:
                    pass  # they have ended
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()

    async def call(self, method: str, **arguments: Any) -> Any:
        """See ``ModelHost``."""
        link = self._link
        if link is None:
            raise LearnerError("the learner is not open")
        if self._is_lost:
            raise LearnerError("the learner's ranks have ended")
        async with self._lock:
            request = await anyio.to_thread.run_sync(self._request, method, arguments)
            with anyio.CancelScope(shield=True):
                return await self._answer(link, request)

    def _request(self, method: str, arguments: dict[str, Any]) -> Frame:
        values, arrays = pack("", self._sequences.replaced(method, arguments))
        return Frame.of({"method": method, "arguments": values}, arrays)

    async def _answer(self, link: Link, request: Frame) -> Any:
        try:
            await link.connection.send(request)
            return await self._received(link.connection)
        except _RankFailed as failed:
            self._is_lost = True
            error = LearnerError(f"a rank of the learner has failed: {failed}")
            error.add_note(await link.last_words())
            raise error from None
        except TimeoutError as error:  # which is an OSError
            self._is_lost = True
            raise LearnerError(
                f"the learner's first rank said nothing for {self._silence_s:g} s while it was at work"
            ) from error
        except _LOST as error:
            self._is_lost = True
            words = "the learner was closed" if self._is_closing else await link.last_words()
            raise LearnerError(f"the learner's ranks have ended: {words}") from error
        except FrameError:
            self._is_lost = True
            raise

    async def _received(self, connection: Connection) -> Any:
        parts: dict[str, Any] = {}
        while True:
            with anyio.fail_after(self._silence_s):
                frame = await connection.receive()
            header = frame.header
            if "part" in header:
                parts.update(await anyio.to_thread.run_sync(_tensors, frame.payload))
            elif "failed" in header:
                raise _RankFailed(header["failed"])
            elif "error" in header:
                raise _error(header)
            elif "result" in header:
                return parts or unpack(header["result"], frame.arrays(), own_class)


def module_paths() -> list[str]:
    """Where this process finds modules, those of a user's losses among them."""
    return [str(Path(path).absolute()) for path in sys.path]


def _tensors(payload: bytes) -> dict[str, Any]:
    from safetensors.torch import load

    return dict(load(payload))


def _error(header: Any) -> Exception:
    """What a rank raised: of its class if that is one of asyncrl's, else a ``LearnerError`` with its name."""
    kind = getattr(errors, header["error"], None)
    if isinstance(kind, type) and issubclass(kind, AsyncRLError):
        error: Exception = kind(header["text"])
    else:
        error = LearnerError(f"a rank of the learner raised {header['error']}: {header['text']}")
    if header.get("trace"):
        error.add_note(f"on the rank:\n{header['trace']}")
    return error
