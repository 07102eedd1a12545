"""How things end: the first error is the one that is raised, and errors that come while something ends are notes on it.

A context whose exit fails while an error is on its way would replace that error, and an exception group hides it
among others. ``keeping_first_error`` is for one context, ``FirstErrorStack`` for a stack of them, ``noting_on`` for
what an ``except`` block still has to do, ``FirstError`` for tasks beside each other. A cancellation is no error: what
fails after one is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "FirstError",
    "FirstErrorStack",
    "LazyCoroutine",
    "first_error",
    "is_cancellation",
    "keeping_first_error",
    "note",
    "noting_on",
]

T = TypeVar("T")
P = ParamSpec("P")


def is_cancellation(error: BaseException | None) -> bool:
    """True for a cancellation and for the close of a generator: somebody wanted an end, and nothing failed."""
    return isinstance(error, asyncio.CancelledError | GeneratorExit)


def first_error(error: BaseException, known: BaseException | None = None) -> BaseException:
    """``known`` if it is in the (nested) exception group, else its first leaf; the others stay visible as notes."""
    leaves = list(_leaves(error))
    first = next((leaf for leaf in leaves if leaf is known), leaves[0])
    for leaf in leaves:
        note(first, leaf)
    return first


def note(first: BaseException, later: BaseException) -> None:
    """Say on ``first`` that ``later`` came after it, with what ``later`` says itself."""
    first = next(_leaves(first))
    for leaf in _leaves(later):
        if leaf is first or is_cancellation(leaf):
            continue
        text = "\n".join([f"and also {type(leaf).__name__}: {leaf}", *getattr(leaf, "__notes__", ())])
        if text not in getattr(first, "__notes__", ()):
            first.add_note(text)


@contextmanager
def noting_on(first: BaseException) -> Iterator[None]:
    """What the block raises is a note on ``first``, which its ``except`` block then raises again.

    If ``first`` is a cancellation it is raised. Whatever the block awaits has to be shielded.
    """
    try:
        yield
    except Exception as later:
        if is_cancellation(first):
            raise
        note(first, later)


@asynccontextmanager
async def keeping_first_error(context: AbstractAsyncContextManager[T]) -> AsyncGenerator[T, None]:
    """``context``, but what its exit raises never replaces what its block has raised."""
    first: BaseException | None = None
    try:
        async with context as value:
            try:
                yield value
            except BaseException as error:
                first = error
                raise
    except BaseException as last:
        if first is None or first is last or is_cancellation(first) or _holds(last, first):
            raise
        for later in _since(first, last):
            note(first, later)
    else:
        return
    raise first  # here, where ``last`` is not its context


class FirstErrorStack(AsyncExitStack):
    """A stack whose every exit is done; of all errors the first is raised, and the others are notes on it."""

    async def enter_async_context(self, cm: AbstractAsyncContextManager[T, Any]) -> T:
        """Enter ``cm``; what its exit raises never replaces an earlier error."""
        return await super().enter_async_context(keeping_first_error(cm))

    def callback(self, callback: Callable[P, T], /, *args: P.args, **kwds: P.kwargs) -> Callable[P, T]:
        """Call ``callback`` at the end; what it raises never replaces an earlier error."""

        async def call() -> None:
            callback(*args, **kwds)

        self.push_async_callback(call)
        return callback

    def push_async_callback(
        self, callback: Callable[P, Awaitable[T]], /, *args: P.args, **kwds: P.kwargs
    ) -> Callable[P, Awaitable[T]]:
        """Await ``callback`` at the end; what it raises never replaces an earlier error."""

        async def close(kind: object, first: BaseException | None, traceback: object) -> None:
            try:
                await callback(*args, **kwds)
            except BaseException as later:
                if first is None or is_cancellation(first):
                    raise
                note(first, later)  # and the stack goes on with the first

        self.push_async_exit(close)
        return callback


class LazyCoroutine(partial[Coroutine[Any, Any, T]]):
    """``tasks.start_soon(LazyCoroutine, function, *args)``: the coroutine is made when its task begins.

    A caller that leaves its loop by an error and ends the event loop cancels tasks that have not begun. anyio then
    leaves their coroutines as they are, and Python warns of each that it was never awaited.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"LazyCoroutine({self.func!r})"

    def __await__(self) -> Generator[Any, Any, T]:
        return self().__await__()

    def send(self, value: Any) -> Any:
        """Not used: it is awaited."""
        raise NotImplementedError

    def throw(self, *error: Any) -> Any:
        """Not used: it is awaited."""
        raise NotImplementedError

    def close(self) -> None:
        """There is nothing to close."""


class FirstError:
    """Remembers which error left one of several tasks first.

    A task group lists errors by when the tasks ended, and one that failed early may have had much to close. ``raised``
    is around the group, ``watched`` around what its tasks do.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The block is the whole of such a task, or of a part whose end takes no time."""
        try:
            yield
        except BaseException as error:
            if self.error is None and not is_cancellation(error):
                self.error = next(_leaves(error))
            raise

    @contextmanager
    def raised(self) -> Iterator[None]:
        """An exception group leaves the block as its error that was first, with the others as notes."""
        failure: BaseException | None = None
        try:
            yield
        except BaseExceptionGroup as group:
            failure = first_error(group, self.error)
        if failure is not None:
            raise failure


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _holds(error: BaseException, first: BaseException) -> bool:
    """True if a leaf of ``first`` is one of the exception group ``error``, which then says all by itself."""
    wanted = {id(leaf) for leaf in _leaves(first)}
    return any(id(leaf) in wanted for leaf in _leaves(error))


def _since(first: BaseException, last: BaseException) -> Iterator[BaseException]:
    """What was raised after ``first``, newest last."""
    chain: list[BaseException] = []
    error: BaseException | None = last
    while error is not None and error is not first and not any(error is seen for seen in chain):
        chain.append(error)
        error = error.__context__
    yield from reversed(chain if error is first else chain[:1])
