"""A call that ends in order: who waits for it may be cancelled at any moment, and the call is told before it is cut.

Cancelling an await closes its socket at once, and a server that sees a request's socket close before the request was
aborted may take it ill. Here the call is first ended by the other side, and cut only if that has no effect. It stays in
the task that makes it: a task for each request would cost more than everything else that is done about one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeAlias, TypeVar

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

    __slots__ = ("_call", "_ended", "_gate", "_interrupted", "_loop", "_result", "_scope", "_waits_for")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._scope = anyio.CancelScope()
        self._call: Coroutine[Any, Any, Any] | None = None
        self._waits_for: asyncio.Future[Any] | None = None
        self._gate: asyncio.Future[None] | None = None
        self._interrupted = False
        self._ended = False
        self._result: Any = None

    def interrupt(self) -> None:
        """End the call: whoever waits for it gets ``Interrupted``."""
        self._interrupted = True
        self._wake()

    async def make(self, call: Coroutine[Any, Any, T], begin_end: Callable[[Told], None]) -> T:
        """Await ``call``. If it is to end early, ``begin_end(told)`` is called, and ``call`` goes on for a while.

        ``begin_end`` must tell the other side, in another task, and then call ``told`` with whether that was taken.
        ``call`` then has a moment to end by itself. If nobody says anything, it is cut after some seconds.
        """
        self._call = call
        with self._scope:
            try:
                self._require_wanted()
                self._go_on(None)
                await self
                return self._result  # type: ignore[no-any-return]
            except (Interrupted, asyncio.CancelledError):
                # From here on only time counts, and nobody's cancellation.
                self._scope.shield = True
                try:
                    if not self._ended:
                        await self._end(begin_end)
                finally:
                    await self._close()
                raise
        raise AssertionError("nobody cancels this scope itself")

    def __await__(self) -> Generator[Any, None, None]:
        """Until the call has ended. A cancellation from outside ends this wait, and leaves the call as it is."""
        while not self._ended:
            future = self._waits_for
            try:
                if future is None:
                    yield  # it gives way to others for one pass of the loop
                else:
                    self._require_wanted()
                    self._gate = self._loop.create_future()
                    # Not at once if it is done already: its own callbacks come first.
                    future.add_done_callback(self._wake)
                    yield from self._gate
                    if not future.done():
                        self._require_wanted()
            except asyncio.CancelledError as error:
                if self._is_outside():
                    raise
                # A deadline inside of the call, or somebody who cancels without a scope.
                yield from self._cut(error)
            else:
                # Not if it was woken for what it no longer waits for.
                if future is None or future.done():
                    self._go_on(None)
            finally:
                self._gate = None
                if future is not None and not future.done():
                    future.remove_done_callback(self._wake)

    async def _end(self, begin_end: Callable[[Told], None]) -> None:
        timer = self._loop.call_later(_LONGEST_S, self.interrupt)

        def told(taken: bool) -> None:
            nonlocal timer
            timer.cancel()
            timer = self._loop.call_later(_SETTLE_S if taken else 0.0, self.interrupt)

        self._interrupted = False
        begin_end(told)
        try:
            await self
        except Interrupted:
            pass
        except Exception:  # noqa: BLE001  whatever the outcome, nobody wants it any more
            pass
        finally:
            timer.cancel()

    async def _close(self) -> None:
        """Cut the call, if it has not ended."""
        self._interrupted = False
        assert self._call is not None
        if self._waits_for is None and not self._ended:
            self._ended = True
            self._call.close()
        if self._ended:
            return
        try:
            await _Awaited(self._cut(asyncio.CancelledError()))
            await self
        except asyncio.CancelledError:
            pass  # the one above
        except Exception:  # noqa: BLE001  whatever the outcome, nobody wants it any more
            pass

    def _cut(self, error: BaseException) -> Generator[Any, None, None]:
        """Cancel what the call waits for, and let it see that."""
        future = self._waits_for
        if future is not None:
            future.cancel(*error.args)
            # As a task waits: after the callbacks that others have put on it.
            future._asyncio_future_blocking = True
            try:
                yield future
            except BaseException as own:  # noqa: BLE001  raised where it belongs, inside of the call
                error = own
        self._go_on(error)

    def _go_on(self, error: BaseException | None) -> None:
        """Let the call go on to its next wait, or to its end."""
        assert self._call is not None
        try:
            self._waits_for = self._call.send(None) if error is None else self._call.throw(error)
        except StopIteration as stop:
            self._ended = True
            self._result = stop.value
        except BaseException:
            self._ended = True
            raise

    def _is_outside(self) -> bool:
        """True if whoever makes the call is cancelled; what is cancelled inside of the call does not count.

        anyio tells this only about the innermost scope, which may be one of the call's own.
        """
        cancelled: bool = self._scope._effectively_cancelled  # type: ignore[attr-defined]
        return cancelled

    def _require_wanted(self) -> None:
        if self._interrupted:
            raise Interrupted

    def _wake(self, _: object = None) -> None:
        if self._gate is not None and not self._gate.done():
            self._gate.set_result(None)


class _Awaited:
    """A generator as something to await."""

    def __init__(self, generator: Generator[Any, None, None]) -> None:
        self._generator = generator

    def __await__(self) -> Generator[Any, None, None]:
        return self._generator
