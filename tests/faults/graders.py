"""Functions that the tests run in worker processes: however they are named, and whatever they take and give."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import asyncrl as rl


@dataclass(frozen=True)
class Answer:
    """A value that can be sent."""

    value: int


class TwoReasons(Exception):
    """One that cannot be read back: it has another ``__init__`` than its text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(value: int) -> Any:
        return function(value)

    return call


def _double(value: int) -> int:
    return 2 * value


double = rl.in_process(_double)


@rl.in_process
@functools.lru_cache
def cached(value: int) -> int:
    """Of another decorator."""
    return 2 * value


@_bare
@rl.in_process
def wrapped(value: int) -> int:
    """Below a decorator that keeps no trace of it."""
    return 2 * value


@rl.in_process
def echo(value: Any) -> Any:
    """What it was given."""
    return value


@rl.in_process
def unsendable(kind: str) -> Any:
    """A result that cannot be sent."""
    return {"generator": (i for i in range(3)), "function": lambda: 1, "module": sys}[kind]


@rl.in_process
def failing(kind: str) -> None:
    """An exception of a kind."""
    if kind == "unreadable":
        raise TwoReasons("one", "two")
    if kind == "exit":
        raise SystemExit(3)
    raise ValueError("no number")


@rl.in_process
def talkative(value: int) -> int:
    """Prints, which must not be taken for a reply."""
    print("thinking", flush=True)
    return value


lost = rl.in_process(_double)
del _double
