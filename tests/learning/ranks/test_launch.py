"""Ranks of our own that do not get as far as a model, with small scripts in their place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learning.ranks.client import RanksHost
from asyncrl.learning.ranks.launch import LocalRanks
from tests.learning.ranks.fakeranks import OPTIONS

CONNECT = "import socket, sys; link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1]); link.recv(1)"

KILLED = """
import os, signal, socket, sys
if os.environ["RANK"] == "1":
    open(sys.argv[2]).read()  # until the other has heard of a call
    os.kill(os.getpid(), signal.SIGKILL)
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
link.recv(1)
open(sys.argv[2], "w").close()
signal.pause()
"""


def _stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> LocalRanks:
    monkeypatch.setattr(LocalRanks, "_command", lambda self, path: [sys.executable, "-c", code, str(path)])
    return LocalRanks(ranks=1, timeout_s=60)


@pytest.mark.parametrize(("code", "kind"), [(1, LearnerError), (2, ConfigError)])
async def test_ranks_that_end_instead_of_connecting_say_why(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    """What they printed is in the error, whose class says whose fault it is."""
    ranks = _stand_in(monkeypatch, f"import sys; print('no module named torch'); sys.exit({code})")
    with pytest.raises(kind, match=rf"(?s)the learner's process ended with exit code {code}.*no module named torch"):
        async with ranks():
            pass


async def test_ranks_end_with_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They see the end of the connection; what they printed is in the log."""
    ranks = _stand_in(monkeypatch, f"print('here', flush=True); {CONNECT}")
    async with LocalRanks(ranks=ranks.ranks, timeout_s=60, log=tmp_path / "ranks.log")() as link:
        pid = link.child.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (tmp_path / "ranks.log").read_text("utf-8") == "here\n"


async def test_lost_ranks_say_how_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code and the last lines."""
    async with _stand_in(monkeypatch, f"{CONNECT}; sys.exit('out of memory')")() as link:
        await link.connection.aclose()
        assert "exit code 1; its last lines:\nout of memory" in await link.last_words()


@pytest.mark.slow
async def test_a_rank_that_is_killed_ends_the_call_and_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under the real torchrun, while the first is deaf as in the middle of a step: the error says which and how."""
    script, heard = tmp_path / "rank.py", tmp_path / "heard"
    script.write_text(KILLED)
    os.mkfifo(heard)
    ranks = LocalRanks(ranks=2, timeout_s=60)
    torchrun = ranks._command(tmp_path)[:6]
    monkeypatch.setattr(LocalRanks, "_command", lambda self, path: [*torchrun, str(script), str(path), str(heard)])
    host = RanksHost(OPTIONS, ranks)
    try:
        with pytest.raises(LearnerError, match=r"(?s)torchrun.* ended with exit code 1.*exitcode: -9\) local_rank: 1"):
            await host.open()
    finally:
        await host.close()


def test_what_ranks_are_told_by_their_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are found as here; a driver under torchrun does not make its process one of those ranks."""
    monkeypatch.setenv("RANK", "3")
    environment = LocalRanks(ranks=1, timeout_s=60, threads=2)._environment()
    assert "RANK" not in environment
    assert environment["OMP_NUM_THREADS"] == "2"
    assert str(Path.cwd()) in environment["PYTHONPATH"].split(os.pathsep)
    command = LocalRanks(ranks=2, timeout_s=60)._command(Path("/tmp/driver"))
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
