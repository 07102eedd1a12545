"""Functions in processes of their own: for graders and tools that compute, or that may never return.

A thread cannot be ended, and one that computes holds the interpreter that every rollout shares. A worker process does
neither: at its deadline it is killed, and the next call starts another one. The pool is anyio's ``to_process``; calls
beyond its size wait their turn, outside of the deadline.

anyio sends the call and its result between parent and child as pickles. Both ends are this program, on pipes that
nobody else can write to; what a model wrote travels in them as a string. asyncrl itself unpickles nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar, overload

import anyio
import anyio.to_process
from anyio.lowlevel import RunVar

from asyncrl.errors import ConfigError, InfrastructureError
from asyncrl.rollout.calls import Deadline

__all__ = ["in_process"]

P = ParamSpec("P")
T = TypeVar("T")

_TIMEOUT_S = 60.0
_START_S = 60.0
# For a new interpreter that imports the function's module.
_limiters: RunVar[anyio.CapacityLimiter] = RunVar("asyncrl.worker_processes")


@overload
def in_process(function: Callable[P, T], /) -> Callable[P, Awaitable[T]]: ...
@overload
def in_process(*, timeout: float = _TIMEOUT_S) -> Callable[[Callable[P, T]], Callable[P, Awaitable[T]]]: ...
def in_process(function: Callable[..., Any] | None = None, /, *, timeout: float = _TIMEOUT_S) -> Any:
    """Make a plain function a coroutine function that runs in a worker process, killed after ``timeout`` seconds::

        @rl.in_process(timeout=10.0)
        def verify(answer: str, expected: str) -> bool:
            return sympy.simplify(f"({answer}) - ({expected})") == 0

        class Algebra(rl.Env):
            async def reward(self, traj, row):
                return float(await verify(traj.final_text, row["answer"]))

    It must stand at the top level of its module, which the worker imports; arguments and result must be picklable.
    There are as many workers as processors. Raises ``RolloutTimeout`` at the deadline (a ``TimeoutError``: catch it
    where it is the model's fault), ``InfrastructureError`` if the process dies, and whatever the function raises.
    """
    if function is None:
        return lambda decorated: _in_process(decorated, timeout)
    return _in_process(function, timeout)


def _in_process(function: Callable[P, T], timeout: float) -> Callable[P, Awaitable[T]]:
    name = getattr(function, "__qualname__", repr(function))
    if not timeout > 0:
        raise ConfigError.for_value(f"timeout of {name}", timeout, "a positive number of seconds")
    if "<" in name or not hasattr(function, "__module__"):
        raise ConfigError(f"{name} runs in a process, and so must stand at the top level of a module to be found there")

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        module = function.__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        work = partial(_call, module, file, name, args, kwargs)
        async with _limiter():
            try:
                # Outside of the deadline: a new process imports the module first. Shielded, because a process that is
                # starting cannot be cancelled without losing it; when this is done there is an idle one.
                with anyio.move_on_after(_START_S, shield=True):
                    await anyio.to_process.run_sync(_ready, module, file, limiter=anyio.CapacityLimiter(1))
                with Deadline(name, timeout):
                    result: T = await anyio.to_process.run_sync(
                        work, cancellable=True, limiter=anyio.CapacityLimiter(1)
                    )
                    return result
            except anyio.BrokenWorkerProcess as error:
                cause = error
        raise InfrastructureError(f"{name}: its process ended") from cause

    return call


def _limiter() -> anyio.CapacityLimiter:
    """The limiter of this event loop."""
    try:
        return _limiters.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(max(2, os.cpu_count() or 2))
        _limiters.set(limiter)
        return limiter


def _ready(module: str, file: str | None) -> None:
    """In the worker: a worker that has done this can call the functions of ``module``."""
    _imported(module, file)


def _call(module: str, file: str | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In the worker: find the function that was decorated, and call it."""
    found: Any = _imported(module, file)
    for part in name.split("."):
        found = getattr(found, part)
    found = getattr(found, "function", found)  # a tool's
    return found.__wrapped__(*args, **kwargs)


def _imported(module: str, file: str | None) -> Any:
    if module in sys.modules:
        return sys.modules[module]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        # A recipe's Python file has a name that only the parent knows.
        spec = importlib.util.spec_from_file_location(module, file) if file is not None else None
        if spec is None or spec.loader is None:
            raise
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)
        return loaded
