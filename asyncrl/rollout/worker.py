"""What runs in a worker process, and the messages between it and its parent. ``processes.py`` is the parent's side.

A worker imports the module of the function that it is to call, and never the parent's main script, unless something
that is defined there is asked for and the script has an ``if __name__ == "__main__":``. What the script does below that
line is then left out. A training run that begins while a worker imports is refused (``refuse_in_worker``).

A worker ends when its parent does: its requests end, whatever it is computing. What a function prints goes to stderr.

Calls, results and exceptions travel as pickles. Both ends are this program, on pipes that nobody else can write to;
what a model wrote travels in them as a string.
"""

from __future__ import annotations

import io
import json
import os
import pickle  # noqa: TID251  between a process and its own child, on pipes of theirs
import queue
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Literal, TypeAlias

from asyncrl.errors import ConfigError
from asyncrl.modules import import_named
from asyncrl.plain import error_text
from asyncrl.rollout.usercode import UserTraceback

__all__ = ["SENDABLE", "Call", "Reply", "main", "packed", "refuse_in_worker", "unpacked"]

SENDABLE = "something that can be sent to another process, such as numbers, text, lists and dataclasses of them"

Declared: TypeAlias = dict[tuple[str, str], Callable[..., Any]]
"""Module and name of each function that was declared with ``in_process``, and the function."""

declared: ContextVar[Declared] = ContextVar("declared")
"""Set in a worker while it imports: where ``in_process`` leaves its functions."""

_MAIN, _MAIN_IN_WORKER = "__main__", "__mp_main__"
# As in multiprocessing.


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call. ``arguments`` is the pickle of ``(args, kwargs)``: None only imports the module."""

    module: str
    file: str | None
    name: str
    arguments: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """How a call ended. ``refused``: the function was not called, or what it returned cannot be sent."""

    kind: Literal["returned", "raised", "refused"]
    value: bytes | None = None
    """The pickle of the result or of the exception, if that can be sent."""
    text: str = ""
    """What went wrong, for a message."""
    raised: UserTraceback | None = None
    """Where, in the worker."""


def refuse_in_worker(what: str) -> None:
    """Raise ``ConfigError`` if a worker process is importing: ``what`` begins a second time there."""
    if declared.get(None) is not None:
        raise ConfigError(
            f"{what} was called while a worker process of rl.in_process imported its module: every worker would start "
            'the same again. Put what starts the run below `if __name__ == "__main__":`, or the function that is to '
            "run in a process into a module of its own"
        )


def packed(value: Any) -> bytes:
    """``value`` as a message. Raises whatever the pickling of its parts raises."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpacked(content: bytes, main: Callable[[], object] | None = None) -> Any:
    """The value of a message; ``main`` gives the main script's module, where it is not loaded yet."""
    return _Unpickler(content, main).load()


class _Unpickler(pickle.Unpickler):
    """Finds what the main script defines, which has two names: one in the parent, and one in workers."""

    def __init__(self, content: bytes, main: Callable[[], object] | None) -> None:
        super().__init__(io.BytesIO(content))
        self._main = main

    def find_class(self, module: str, name: str, /) -> Any:
        """The object ``name`` of ``module``; runs the main script first if it is in there."""
        if module in (_MAIN, _MAIN_IN_WORKER):
            module = _MAIN
            if self._main is not None:
                self._main()
        return super().find_class(module, name)


class _Worker:
    """What has been imported, and the functions in it."""

    def __init__(self, script: tuple[str, bool] | None) -> None:
        self._script = script
        # A file, or with True the name of a module, if it is safe to run.
        self._functions: Declared = {}
        self._main: ModuleType | None = None

    def answer(self, call: Call) -> Reply:
        """Make the call. What goes wrong is told in the reply."""
        function = self._found(call)
        if isinstance(function, Reply):
            return function
        if call.arguments is None:
            return Reply(kind="returned", value=packed(None))
        try:
            args, kwargs = unpacked(call.arguments, self._main_script)
        except BaseException as error:  # noqa: BLE001  told to the parent
            wrong = f"the arguments of {call.name} cannot be read by its worker process: {error_text(error)}"
            return Reply(kind="refused", text=wrong)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  told to the parent
            return _raised(error)
        try:
            return Reply(kind="returned", value=packed(result))
        except Exception as error:  # noqa: BLE001  told to the parent
            what = f"{type(result).__name__}: {error_text(error)}"
            return Reply(kind="refused", text=f"the result of {call.name} is of type {what}, but must be {SENDABLE}")

    def _found(self, call: Call) -> Callable[..., Any] | Reply:
        """The function, or why there is none."""
        try:
            module = self._imported(call)
        except BaseException as error:  # noqa: BLE001  told to the parent
            wrong = f"a worker process cannot import {call.module}, which has {call.name}: {error_text(error)}"
            return Reply(kind="refused", text=wrong, raised=UserTraceback.of(error))
        # As it was declared, or else whatever has its name.
        name = _MAIN_IN_WORKER if call.module == _MAIN else call.module
        wrong = f"{call.module} has no {call.name} when a worker process imports it: it must stand at the top level"
        found = self._functions.get((name, call.name)) or getattr(module, call.name, None)
        return found or Reply(kind="refused", text=wrong)

    def _imported(self, call: Call) -> Any:
        if call.module == _MAIN:
            return self._main_script()
        if call.module in sys.modules:
            return sys.modules[call.module]
        return self._watching(lambda: import_named(call.module, call.file))

    def _main_script(self) -> ModuleType:
        if self._main is None:
            if self._script is None:
                raise ConfigError(
                    "what the main script defines cannot be found in a worker: put it into a module of its own"
                )
            self._main = self._watching(self._run_script)
        return self._main

    def _run_script(self) -> ModuleType:
        assert self._script is not None
        where, is_module = self._script
        module = ModuleType(_MAIN_IN_WORKER)
        sys.modules[_MAIN] = sys.modules[_MAIN_IN_WORKER] = module
        run: Callable[..., dict[str, Any]] = runpy.run_module if is_module else runpy.run_path
        module.__dict__.update(run(where, run_name=_MAIN_IN_WORKER))
        return module

    def _watching(self, load: Callable[[], ModuleType]) -> ModuleType:
        token = declared.set(self._functions)
        try:
            return load()
        finally:
            declared.reset(token)


def _raised(error: BaseException) -> Reply:
    """The reply for what a function raised; with the exception only if the parent can read it, and it does not exit."""
    value = None
    if isinstance(error, Exception):
        try:
            value = packed(error)
            unpacked(value)
        except Exception:  # noqa: BLE001  then its text is what can be sent
            value = None
    return Reply(kind="raised", value=value, text=error_text(error), raised=UserTraceback.of(error))


def main(start: str) -> None:
    """Answer calls until the parent is gone. ``start``: JSON of the main script, if it may be run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    requests, replies = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123  a device
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    script = json.loads(start)
    worker = _Worker(None if script is None else (script[0], script[1]))
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, calls), daemon=True).start()
    while True:
        replies.send(worker.answer(calls.get()))


def _receive(requests: Connection, calls: queue.SimpleQueue[Call]) -> None:
    """In a thread, so that the end of the parent is seen by a worker that computes."""
    while True:
        try:
            calls.put(requests.recv())
        except (EOFError, OSError):
            os._exit(0)
