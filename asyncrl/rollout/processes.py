"""Functions in processes of their own: for graders and tools that compute, or that may never return.

A thread cannot be ended, and one that computes holds the interpreter that every rollout shares. A worker process does
neither: at its deadline it is killed, and the next call starts another one. Calls beyond the pool's size wait their
turn, outside of the deadline. ``worker.py`` is what runs in them.

This is not anyio's ``to_process`` nor ``concurrent.futures``: their workers run the main script again, which without an
``if __name__ == "__main__":`` is the whole training. What cannot work is refused when it is declared.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from asyncrl.concurrency.outside import waiting_outside
from asyncrl.errors import ConfigError, EnvironmentFailure, InfrastructureError
from asyncrl.rollout.calls import Deadline, of_loop
from asyncrl.rollout.worker import SENDABLE, Call, Reply, declared, packed, refuse_in_worker, unpacked

__all__ = ["in_process"]

P = ParamSpec("P")
T = TypeVar("T")

_TIMEOUT_S = 60.0
_pools: RunVar[_Pool] = RunVar("asyncrl.worker_processes")
_START_S = 60.0
# For a new interpreter that imports the function's module.
_END_S = 1.0
# For the system to take a killed process away.
_MAIN = "__main__"


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

    It must stand at the top level of a module that the worker can import: not of a notebook, and of the main script
    only if that has an ``if __name__ == "__main__":``. Arguments and result must be picklable. There are as many
    workers as processors. Raises ``RolloutTimeout`` at the deadline (a ``TimeoutError``: catch it where it is the
    model's fault), ``InfrastructureError`` if the process dies, and whatever the function raises. ``ConfigError`` says
    what cannot be run in a process, when it is declared, and what cannot be sent.
    """
    if function is None:
        return lambda decorated: _in_process(decorated, timeout)
    return _in_process(function, timeout)


def _in_process(function: Callable[P, T], timeout: float) -> Callable[P, Awaitable[T]]:
    name = str(getattr(function, "__qualname__", repr(function)))
    if not timeout > 0:
        raise ConfigError.for_value(f"timeout of {name}", timeout, "a positive number of seconds")
    if instead := _unfit(function, name):
        raise ConfigError(f"rl.in_process cannot run {name}: {instead}")
    module = function.__module__
    functions = declared.get(None)
    if functions is not None:
        functions[module, name] = function
    elif module == _MAIN and (instead := _unfit_script(function)):
        raise ConfigError(f"rl.in_process cannot run {name}: {instead}")

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse_in_worker(name)
        arguments = _packed_arguments(function, name, args, kwargs)
        file = getattr(sys.modules.get(module), "__file__", None)
        request = Call(module=module, file=file, name=name, arguments=arguments)
        async with _pool().process() as process:
            if (module, name) not in process.known:
                # Outside of the deadline: a new process imports the module first.
                with Deadline(f"a worker process that imports {module}", _START_S):
                    _value(name, await process.ask(dataclasses.replace(request, arguments=None)))
                process.known.add((module, name))
            with Deadline(name, timeout):
                reply = await process.ask(request)
        result: T = _value(name, reply)
        return result

    return call


def _unfit(function: Any, name: str) -> str | None:
    """Why a worker could not find or run it, and what to write instead; None if it could."""
    plain = inspect.unwrap(function)
    top_level = "it must stand at the top level of a module, as a plain `def` that calls whatever it needs"
    checks: tuple[tuple[bool, str], ...] = (
        (
            inspect.ismethod(function) or isinstance(function, staticmethod | classmethod),
            f"it is a method, whose object its process does not have: {top_level}",
        ),
        (
            any(map(inspect.iscoroutinefunction, (function, plain))) or inspect.isasyncgenfunction(plain),
            "it is an `async def`, which belongs on the event loop: await it as it is, or write `def` if it computes",
        ),
        (inspect.isgeneratorfunction(plain), "it is a generator, which cannot be sent back: return a list"),
        (not inspect.isfunction(plain), f"it was not written with `def`: {top_level}"),
        (
            "<" in name or "." in name or not isinstance(getattr(function, "__module__", None), str),
            f"its process would not find it: {top_level}",
        ),
    )
    return next((instead for wrong, instead in checks if wrong), None)


def _unfit_script(function: Any) -> str | None:
    """Why a worker could not find a function of the main script or notebook; None if it could."""
    own = "put the function into a module of its own, such as graders.py, and import it from there"
    file = getattr(sys.modules.get(_MAIN), "__file__", None)
    code = inspect.unwrap(function).__code__.co_filename
    if file is None or not Path(file).is_file() or Path(code).resolve() != Path(file).resolve():
        return f"it was written in a notebook or on the command line, which a worker process cannot import: {own}"
    if not _has_guard(Path(file)):
        return (
            f'{file} has no `if __name__ == "__main__":`, so that each worker process would run all of it again: put '
            f"what starts the run below that line, or {own}"
        )
    return None


def _has_guard(script: Path) -> bool:
    """Whether a worker can run the main script without starting what it starts."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    tests = [node.test for node in tree.body if isinstance(node, ast.If)]
    return any(isinstance(name, ast.Name) and name.id == "__name__" for test in tests for name in ast.walk(test))


def _packed_arguments(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bytes:
    """The arguments as a message. Raises ``ConfigError`` with the name of the first that cannot be sent, and
    ``TypeError`` if they do not fit the function.
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    try:
        return packed((args, dict(kwargs)))
    except Exception as error:  # noqa: BLE001  whatever the object's own pickling raises
        cause = error
    for parameter, value in bound.arguments.items():
        try:
            packed(value)
        except Exception as error:
            kind = type(value).__name__
            raise ConfigError(
                f"argument {parameter!r} of {name} is of type {kind}, but must be {SENDABLE} ({error})"
            ) from error
    raise ConfigError(f"the arguments of {name} must be {SENDABLE} ({cause})") from cause


def _value(name: str, reply: Reply) -> Any:
    """The result of a call. Raises what the function raised, or ``ConfigError`` for what was refused."""
    if reply.kind == "returned":
        assert reply.value is not None
        try:
            return unpacked(reply.value)
        except Exception as error:
            raise ConfigError(f"the result of {name} must be {SENDABLE} ({type(error).__name__}: {error})") from error
    failure: object = ConfigError(reply.text)
    if reply.kind == "raised":
        failure = None if reply.value is None else unpacked(reply.value)
        if not isinstance(failure, Exception):
            failure = EnvironmentFailure(f"{name} raised {reply.text}")
    assert isinstance(failure, Exception)
    raise failure from reply.raised


class _Process:
    """A worker process. Its pipes are read and written in threads."""

    def __init__(self) -> None:
        """Start it, which blocks for some milliseconds."""
        path = [entry for entry in sys.path if isinstance(entry, str)]
        code = f"import sys; sys.path[:] = {path!r}; from asyncrl.rollout.worker import main; main(sys.argv[1])"
        requests, self._requests = Pipe(duplex=False)
        self._replies, replies = Pipe(duplex=False)
        with requests, replies:
            command = [sys.executable, "-c", code, json.dumps(_script())]
            self._process = subprocess.Popen(command, stdin=requests.fileno(), stdout=replies.fileno())
        self._killed = False
        self.known: set[tuple[str, str]] = set()
        """Module and name of each function that it has found."""

    @property
    def usable(self) -> bool:
        """False once it has ended."""
        return not self._killed and self._process.poll() is None

    async def ask(self, request: Call) -> Reply:
        """The reply. Kills the process if the caller is cancelled; raises ``InfrastructureError`` if it ends itself."""
        done = False
        try:
            exchange = partial(self._exchange, request)
            limiter = anyio.CapacityLimiter(1)
            with waiting_outside():
                reply = await anyio.to_thread.run_sync(exchange, abandon_on_cancel=True, limiter=limiter)
            done = True
        finally:
            if not done:
                self._killed = True
                self._process.kill()  # which ends the thread too, and that closes the pipes
                wait = self._process.wait
                with anyio.move_on_after(_END_S, shield=True), waiting_outside():
                    await anyio.to_thread.run_sync(wait, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        return reply

    def _exchange(self, request: Call) -> Reply:
        try:
            self._requests.send(request)
            reply: Reply = self._replies.recv()
        except (EOFError, OSError):
            self.end()
            raise InfrastructureError(f"{request.name}: its process ended, with {self._process.returncode}") from None
        return reply

    def end(self) -> None:
        """Kill it and close its pipes. Not to be called beside ``ask``."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._replies.close()


class _Pool:
    """The worker processes of one event loop. They end with it."""

    def __init__(self) -> None:
        self.limiter = anyio.CapacityLimiter(max(2, os.cpu_count() or 2))
        self._idle: list[_Process] = []
        self._until_shutdown: AsyncGenerator[None, None] | None = None
        # Where a loop is closed without shutting down its generators, as at the end of a notebook's process.
        weakref.finalize(self, _end_all, self._idle)

    @asynccontextmanager
    async def process(self) -> AsyncGenerator[_Process, None]:
        """A worker process for the block, once one is free."""
        async with self.limiter:
            process = self._take_nowait() or await self._start()
            try:
                yield process
            finally:
                if process.usable:
                    self._idle.append(process)

    def _take_nowait(self) -> _Process | None:
        while self._idle:
            process = self._idle.pop()
            if process.usable:
                return process
            process.end()
        return None

    async def _start(self) -> _Process:
        if self._until_shutdown is None:
            # The loop closes its generators when it shuts down.
            self._until_shutdown = _end_at_shutdown(self._idle, _end_all)
            await anext(self._until_shutdown)
        return await anyio.to_thread.run_sync(_Process)


async def _end_at_shutdown(
    processes: list[_Process], end_all: Callable[[list[_Process]], None]
) -> AsyncGenerator[None, None]:
    """``end_all`` is an argument because this may be closed when the interpreter has cleared its modules."""
    try:
        yield
    finally:
        end_all(processes)


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()


def _pool() -> _Pool:
    """The pool of this event loop."""
    return of_loop(_pools, _Pool)


def _script() -> tuple[str, bool] | None:
    """The main script as a worker may run it, if something in it is asked for: its module or its file."""
    main = sys.modules.get(_MAIN)
    file = getattr(main, "__file__", None)
    if file is None or not _has_guard(Path(file)):
        return None
    spec = getattr(main, "__spec__", None)
    return (str(Path(file).absolute()), False) if spec is None else (spec.name, True)
