"""The one place where compute leaves the event loop: a thread of its own, one call at a time, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import anyio

__all__ = ["Worker"]

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """One named thread. Always the same one, because torch keeps settings for each thread.

    A call that runs cannot be interrupted: cancellation waits for its end, so that whatever it changes is whole.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in the thread, after the calls before it, and return or raise what it does."""
        call = self._executor.submit(function, *args, **kwargs)
        with anyio.CancelScope(shield=True):
            result = await asyncio.wrap_future(call)
        return result  # noqa: RET504  by its type, the scope might not get here

    def close(self) -> None:
        """End the thread when its last call has ended."""
        self._executor.shutdown(wait=False)
