"""Whose line an error is blamed on, and how the lines are shown."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.errors import ConfigError, InfrastructureError
from asyncrl.modules import load_file
from asyncrl.plain import number
from asyncrl.rollout.calls import call_user
from asyncrl.rollout.usercode import UserTraceback, folded_traceback, is_user_file, place_of
from asyncrl.rollout.worker import packed, unpacked
from asyncrl.testing import run_virtual

HERE = __file__
LIBRARY = sysconfig.get_path("purelib")
PACKAGE = str(Path(rl.__file__).parent)


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        (HERE, True),
        ("/home/me/task/env.py", True),
        ("env.py", True),
        ("/tmp/ipykernel_7/12.py", True),
        ("<ipython-input-3-abc>", True),
        ("<stdin>", True),
        (f"{PACKAGE}/envs/guess_number/env.py", True),
        (f"{PACKAGE}_mine/env.py", True),
        (f"{PACKAGE}/rollout/group.py", False),
        (json.__file__, False),
        (anyio.__file__, False),
        (f"{LIBRARY}/some/env.py", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<string>", False),
        ("<__array_function__ internals>", False),
    ],
)
def test_whose_a_file_is(file: str, is_users: bool) -> None:
    """What is neither Python's, nor installed, nor ours; the examples are there to be changed."""
    assert is_user_file(file) == is_users


def _raise(error: BaseException) -> None:
    raise error


def _library() -> None:
    json.loads("{")


def _ours() -> None:
    number("three")


class _Grader:
    def grade(self, depth: int) -> int:
        return 1 // depth if depth <= 0 else self.grade(depth - 1)

    def ping(self, depth: int) -> int:
        return self.pong(depth)

    def pong(self, depth: int) -> int:
        return self.ping(depth + 1)


async def _grouped() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 1)
        tasks.start_soon(_late)


async def _late() -> None:
    await anyio.lowlevel.checkpoint()
    _raise(KeyError("late"))


def _chained() -> None:
    try:
        _library()
    except ValueError as error:
        raise InfrastructureError("the sandbox") from error


_CASES: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "plain": (lambda: _raise(KeyError("a")), "_raise", "    raise error", ""),
    "library": (_library, "_library", '    json.loads("{")', "calls in json]"),
    "ours": (_ours, "_ours", '    number("three")', "1 call in asyncrl]"),
    "method": (lambda: _Grader().grade(0), "_Grader.grade", "    return 1 // depth", ""),
    "recursion": (lambda: _Grader().grade(40), "_Grader.grade", "    return 1 // depth", "same line 39 more times]"),
    "endless": (lambda: _Grader().ping(0), "_Grader.", "    return self.p", "[and more above]"),
    "group": (lambda: run_virtual(_grouped), "_raise", "    raise error", ""),
    "cause": (_chained, "_chained", '    raise InfrastructureError("the sandbox") from error', ""),
}


@pytest.mark.parametrize("case", _CASES)
def test_the_innermost_line_of_the_user_is_the_place(case: str) -> None:
    """Whoever raised it; the traceback is short, ends there, and folds what others do."""
    function, name, source, folded = _CASES[case]
    with pytest.raises(BaseException) as caught:
        function()
    place, lines = place_of(caught.value), folded_traceback(caught.value)
    assert place.startswith(f"{HERE}:")
    assert f" in {name}" in place
    assert source in lines
    assert folded in lines
    assert len(lines.splitlines()) <= 20
    line = place.partition(" ")[0].rpartition(":")[2]
    assert f'File "{HERE}", line {line}, in ' in lines


def test_what_the_machinery_made_of_an_error_has_its_place() -> None:
    """The error that the environment's call raises has no line of the user: its cause has."""

    def fetch() -> None:
        _raise(TimeoutError("no answer"))

    with pytest.raises(InfrastructureError) as caught:
        run_virtual(call_user, _async(fetch))
    caught.value.__traceback__ = None
    assert f"{HERE}:" in place_of(caught.value)
    assert "_raise" in place_of(caught.value)
    assert "raise error" in folded_traceback(caught.value)


def _async(function: Callable[[], None]) -> Callable[[], Any]:
    async def call() -> None:
        function()

    return call


@pytest.mark.parametrize("depth", [0, 1])
def test_a_syntax_error_is_where_it_is_written(tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the file was imported."""
    monkeypatch.syspath_prepend(tmp_path)
    wrong = tmp_path / "helper_that_is_wrong.py"
    wrong.write_text("x = 1\ndef broken(:\n", encoding="utf-8")
    file = wrong
    if depth:
        file = tmp_path / "env.py"
        file.write_text("import helper_that_is_wrong\n", encoding="utf-8")
    with pytest.raises(SyntaxError) as caught:
        load_file("asyncrl_test_syntax", file)
    error = ConfigError("the recipe")
    error.__cause__ = caught.value
    for found in (caught.value, error):
        assert place_of(found) == f"{wrong}:2"
        assert folded_traceback(found).splitlines()[:2] == [f'  File "{wrong}", line 2', "    def broken(:"]


def test_text_that_cannot_be_compiled_is_blamed_on_who_compiles_it() -> None:
    """It has no file: what a model wrote, say."""
    with pytest.raises(SyntaxError) as caught:
        compile("def (", "<answer>", "exec")
    assert place_of(caught.value).startswith(f"{HERE}:")


def test_an_error_of_nobody_has_no_place() -> None:
    """It was never raised, or by others only."""
    assert place_of(None) == folded_traceback(None) == ""
    assert place_of(KeyError("a")) == folded_traceback(KeyError("a")) == ""
    error = KeyError("a")
    error.__cause__ = error
    assert place_of(error) == ""


def test_the_place_in_a_worker_process_counts_more_than_that_of_its_caller() -> None:
    """It travels with the error, as text."""
    with pytest.raises(KeyError) as caught:
        _raise(KeyError("inside"))
    sent = unpacked(packed(UserTraceback.of(caught.value)))
    outer = KeyError("inside")
    with pytest.raises(KeyError):
        raise outer from sent
    assert place_of(outer) == place_of(caught.value)
    assert folded_traceback(outer) == folded_traceback(caught.value)
    assert "in the user's code:\n  File" in str(sent)


@given(st.lists(st.sampled_from(["user", "library", "ours"]), min_size=1, max_size=12), st.integers(0, 3))
def test_any_chain_of_calls_is_folded_around_the_users_lines(kinds: list[str], causes: int) -> None:
    """Each line of the user that is shown is one of theirs; the place is the last; others are never shown."""

    def call(rest: list[str]) -> None:
        if not rest:
            raise LookupError("end")
        if rest[0] == "library":
            json.dumps([], default=None, cls=_calling(call, rest[1:]))
        elif rest[0] == "ours":
            number(_Item(call, rest[1:]))
        else:
            call(rest[1:])

    try:
        call(kinds)
    except Exception as raised:  # noqa: BLE001  ours make another one of it
        error: BaseException = raised
    for _ in range(causes):
        outer = RuntimeError("outer")
        outer.__cause__ = error
        error = outer
    place, lines = place_of(error), folded_traceback(error).splitlines()
    assert place.startswith(f"{HERE}:")
    shown = [line for line in lines if line.startswith('  File "')]
    assert 1 <= len(shown) <= 5
    assert all(HERE in line for line in shown)
    assert f"line {place.partition(' ')[0].rpartition(':')[2]}, in" in shown[-1]


def _calling(call: Callable[[list[str]], None], rest: list[str]) -> type[json.JSONEncoder]:
    class Encoder(json.JSONEncoder):
        def encode(self, o: Any) -> str:
            call(rest)
            return ""

    return Encoder


class _Item:
    """Its number is a call."""

    def __init__(self, call: Callable[[list[str]], None], rest: list[str]) -> None:
        self._call = call
        self._rest = rest

    def item(self) -> float:
        self._call(self._rest)
        return 0.0
