"""A call that ends in order: who waits for it may be cancelled at any moment, and the call is told before it is cut.

Cancelling an await closes its socket at once, and a server that sees a request's socket close before the request was
aborted may take it ill. Here the call is first ended by the other side, and cut only if that has no effect. It stays in
the task that makes it: a task for each request would cost more than everything else that is done about one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeAlias, TypeVar

import anyio

__all__ = ["HeldCall", "Interrupted", "Told"]

T = TypeVar("T")
Told: TypeAlias = Callable[[bool], None]
"""To be called once the other side was told to end a call: True if it took that."""

_LONGEST_S = 6.0
# More than an abort may take; only if its task is gone nobody says anything.
_SETTLE_S = 1.0
# A request that was aborted ends after its next token.


class Interrupted(Exception):
    """``HeldCall.interrupt`` was called before the call had ended."""


class HeldCall:
    """One call. ``interrupt`` ends it from elsewhere, and so does the cancellation of whoever makes it."""

    __slots__ = ("_gate", "_interrupted", "_scope")

    def __init__(self) -> None:
        self._scope = anyio.CancelScope()
        self._gate: asyncio.Future[None] | None = None
        self._interrupted = False

    def interrupt(self) -> None:
        """End the call: whoever waits for it gets ``Interrupted``."""
        self._interrupted = True
        self._wake()

    async def make(self, call: Coroutine[Any, Any, T], begin_end: Callable[[Told], None]) -> T:
        """Await ``call``. If it is to end early, ``begin_end(told)`` is called, and ``call`` goes on for a while.

        ``begin_end`` must tell the other side, in another task, and then call ``told`` with whether that was taken.
        ``call`` then has a moment to end by itself. If nobody says anything, it is cut after some seconds.
        """
        driven = _Driven(call, self)
        with self._scope:
            try:
                return await driven
            except (Interrupted, asyncio.CancelledError):
                # From here on only time counts, and nobody's cancellation.
                self._scope.shield = True
                try:
                    if driven.began:
                        await self._end(driven, begin_end)
                finally:
                    await driven.close()
                raise
        raise AssertionError("nobody cancels this scope itself")

    async def until(self, future: asyncio.Future[Any]) -> None:
        """Wait for ``future`` without being its owner: a cancellation ends this wait, and leaves ``future`` alone."""
        self._require_wanted()
        self._gate = asyncio.get_running_loop().create_future()
        future.add_done_callback(self._wake)
        try:
            await self._gate
        finally:
            future.remove_done_callback(self._wake)
            self._gate = None
        if not future.done():
            self._require_wanted()

    @property
    def to_end(self) -> bool:
        """True if whoever makes the call is cancelled; what is cancelled inside of the call does not count.

        anyio tells this only about the innermost scope, which may be one of the call's own.
        """
        cancelled: bool = self._scope._effectively_cancelled  # type: ignore[attr-defined]
        return cancelled

    async def _end(self, driven: _Driven[Any], begin_end: Callable[[Told], None]) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_LONGEST_S, self.interrupt)

        def told(taken: bool) -> None:
            nonlocal timer
            timer.cancel()
            timer = loop.call_later(_SETTLE_S if taken else 0.0, self.interrupt)

        self._interrupted = False
        begin_end(told)
        try:
            await driven
        except Interrupted:
            pass
        except Exception:  # noqa: BLE001  whatever the outcome, nobody wants it any more
            pass
        finally:
            timer.cancel()
            self._interrupted = False

    def _require_wanted(self) -> None:
        if self._interrupted:
            raise Interrupted

    def _wake(self, _: object = None) -> None:
        if self._gate is not None and not self._gate.done():
            self._gate.set_result(None)


class _Driven(Generic[T]):
    """Awaits a coroutine as ``await`` does, except that a cancellation stops the waiting and not the coroutine."""

    __slots__ = ("_call", "_ended", "_held", "_result", "_waits_for", "began")

    def __init__(self, call: Coroutine[Any, Any, T], held: HeldCall) -> None:
        self._call = call
        self._held = held
        self._waits_for: asyncio.Future[Any] | None = None
        self.began = False
        self._ended = False
        self._result: Any = None

    def __await__(self) -> Generator[Any, None, T]:
        if not self.began:
            self.began = True
            self._go_on(None)
        while not self._ended:
            error: BaseException | None = None
            future = self._waits_for
            try:
                if future is None:
                    yield  # it gives way to others for one pass of the loop
                elif not future.done():
                    yield from self._held.until(future).__await__()
            except asyncio.CancelledError as cancelled:
                if self._held.to_end:
                    raise
                # A deadline inside of the call, or somebody who cancels without a scope.
                if future is not None:
                    future.cancel()
                error = cancelled
            self._go_on(error)
        return self._result  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Cut it, if it has not ended."""
        if not self.began:
            self._call.close()
            self._ended = True
        if self._ended:
            return
        if self._waits_for is not None:
            self._waits_for.cancel()
        try:
            self._go_on(asyncio.CancelledError())
            await self
        except asyncio.CancelledError:
            pass  # the one above
        except Exception:  # noqa: BLE001  whatever the outcome, nobody wants it any more
            pass

    def _go_on(self, error: BaseException | None) -> None:
        try:
            future = self._call.send(None) if error is None else self._call.throw(error)
        except StopIteration as stop:
            self._ended = True
            self._result = stop.value
        except BaseException:
            self._ended = True
            raise
        else:
            self._waits_for = future
            if future is not None:
                # As a task does with what it waits for.
                future._asyncio_future_blocking = False
