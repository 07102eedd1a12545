"""What travels to worker processes and back, and what the program around them may be."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.rollout.processes import _pool, in_process
from asyncrl.rollout.usercode import folded_traceback, place_of
from tests.faults import graders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


async def test_functions_are_found_by_what_was_declared() -> None:
    """Under another name, below and above other decorators, or deleted since."""
    for function in (graders.double, graders.cached, graders.wrapped, graders.lost):
        assert await function(21) == 42
    assert await graders.talkative(7) == 7
    sent = [0, "text", b"bytes", None, {"a": [1.5]}, graders.Answer(3), "\ud800", 10**30]
    assert [await graders.echo(value) for value in sent] == sent


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), lambda: 1, sys, {"a": [sys]}, (i for i in range(3))],
    ids=["lock", "function", "module", "dict", "generator"],
)
async def test_what_cannot_be_sent_is_named(value: Any) -> None:
    """The argument, its type and what may be sent; nothing is started for it."""
    started = len(_pool()._idle)
    with pytest.raises(ConfigError, match=rf"argument 'value' of echo is of type {type(value).__name__}, but must be"):
        await graders.echo(value)
    assert len(_pool()._idle) == started
    with pytest.raises(TypeError, match="missing a required argument: 'value'"):
        await graders.echo()  # type: ignore[call-arg]


async def test_results_and_errors_that_cannot_be_sent_are_named() -> None:
    """The process goes on; an exception comes with its place in the worker."""
    for kind in ("generator", "function", "module"):
        with pytest.raises(ConfigError, match=f"the result of unsendable is of type {kind}: .* but must be"):
            await graders.unsendable(kind)
    for kind, text in (("unreadable", "failing raised TwoReasons: one"), ("exit", "failing raised SystemExit: 3")):
        with pytest.raises(EnvironmentFailure, match=text):
            await graders.failing(kind)
    with pytest.raises(ValueError, match="no number") as raised:
        await graders.failing("value")
    assert re.fullmatch(r".*graders\.py:\d+ in failing", place_of(raised.value))
    assert 'raise ValueError("no number")' in folded_traceback(raised.value)
    assert len(_pool()._idle) == 1


def test_the_processes_of_a_loop_end_with_it() -> None:
    """No zombie and no open pipe stays behind."""

    async def main() -> int:
        await graders.double(1)
        return _pool()._idle[0]._process.pid

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


GRADER = """
    import asyncrl as rl

    @rl.in_process
    def double(x):
        return 2 * x
"""
RUN = """
    import asyncio

    print("begins")

    async def main():
        print(await double(21))
"""
GUARDED = """
    if __name__ == "__main__":
        asyncio.run(main())
"""
BARE = """
    asyncio.run(main())
"""


def _script(folder: Path, *parts: str, name: str = "script.py") -> Path:
    (folder / name).write_text("\n".join(textwrap.dedent(part) for part in parts), encoding="utf-8")
    return folder / name


def _run(*arguments: str | Path, given: str | None = None) -> tuple[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        input=given,
        check=False,
    )
    return done.stdout, done.stderr


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """Its functions for processes are in a module of their own: no worker imports the script."""
    _script(tmp_path, GRADER, name="graders.py")
    script = _script(tmp_path, "from graders import double", RUN, BARE)
    assert _run(script) == ("begins\n42\n", "")


def test_a_function_of_a_guarded_script_runs(tmp_path: Path) -> None:
    """As a file and as a module; what it is given and gives may be of the script too. The worker prints to stderr."""
    script = _script(
        tmp_path,
        GRADER,
        RUN.replace("double(21)", "double(Number(21))"),
        """
        class Number:
            def __init__(self, value):
                self.value = value

            def __rmul__(self, other):
                return Number(other * self.value)

            def __str__(self):
                return str(self.value)
        """,
        GUARDED,
    )
    assert _run(script) == ("begins\n42\n", "begins\n")


@pytest.mark.parametrize("how", ["file", "command", "stdin"])
def test_a_function_that_no_worker_could_import_is_refused_at_once(tmp_path: Path, how: str) -> None:
    """Of a script without a guard, which would begin again; of a command line; of a notebook, which looks like one."""
    script = _script(tmp_path, GRADER, RUN, BARE)
    text = script.read_text(encoding="utf-8")
    output, errors = {
        "file": lambda: _run(script),
        "command": lambda: _run("-c", text),
        "stdin": lambda: _run("-", given=text),
    }[how]()
    assert output == ""
    assert "ConfigError: rl.in_process cannot run double" in errors
    assert "put the function into a module of its own" in errors
    assert ("has no `if __name__ ==" in errors) == (how == "file")


def test_a_training_that_begins_in_a_worker_is_refused(tmp_path: Path) -> None:
    """A script whose guard is in the wrong place: the worker that imports it does not train, and the run says why."""
    training = """
        import asyncrl as rl
        from asyncrl.testing import ByteRenderer, scripted_policy

        class Env(rl.Env):
            async def reset(self, row):
                return [{"role": "user", "content": "go"}]

            async def reward(self, traj, row):
                return float(await double(traj.member))

        engine = rl.RolloutEngine(scripted_policy(), env=Env, renderer=ByteRenderer())
        trainer = rl.AsyncTrainer(
            engine=engine, optimizer=rl.Adam(lr=1e-3), groups_per_step=1, group_size=2, max_staleness=0
        )
        rl.run(trainer, [1], steps=1, keep=False)
        if __name__ == "__main__":
            print("trained")
    """
    output, errors = _run(_script(tmp_path, GRADER, training))
    assert output == ""
    assert "AsyncTrainer.run was called while a worker process of rl.in_process imported its module" in errors
    assert 'Put what starts the run below `if __name__ == "__main__":`' in errors


def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Also one that computes for ever: it sees the end of its pipe."""
    _script(
        tmp_path,
        """
        import os, asyncrl as rl

        @rl.in_process
        def spin(file):
            open(file, "w").write(str(os.getpid()))
            while True:
                pass
        """,
        name="graders.py",
    )
    seen = tmp_path / "pid"
    os.mkfifo(seen)
    call = f"import asyncio, graders; asyncio.run(graders.spin({str(seen)!r}))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    parent = subprocess.Popen([sys.executable, "-c", call], env=environment)
    worker = int(seen.read_text(encoding="utf-8"))
    ended = os.pidfd_open(worker)
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert _wait(ended)
    finally:
        os.close(ended)


def _wait(descriptor: int) -> bool:
    """Until the process of a descriptor has ended, for at most 30 seconds."""
    import select

    return bool(select.select([descriptor], [], [], 30)[0])


async def test_a_call_inside_of_a_loop_of_another_kind_works() -> None:
    """Nothing depends on the kind of loop: the processes are driven from threads."""
    done: list[int] = []

    def other() -> None:
        done.append(anyio.run(graders.double, 4))

    await anyio.to_thread.run_sync(other)
    assert done == [8]
    assert await graders.double(5) == 10


def test_run_in_a_running_loop_says_what_to_write() -> None:
    """As in a notebook, whose cells run in a loop."""

    async def cell() -> None:
        rl.run(None, [1], steps=1)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"async for step in trainer\.run"):
        asyncio.run(cell())


def test_in_process_is_public() -> None:
    """The name that the messages use."""
    assert rl.in_process is in_process
