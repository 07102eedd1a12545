"""Starting and ending a server process, with small scripts in the place of the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, ServerUnavailable
from asyncrl.servers.launch import EmbeddedServer, launched

pytestmark = pytest.mark.slow

READY = "import json, os, sys; print(json.dumps({'url': f'http://127.0.0.1:{os.getpid()}'}), flush=True);"
UNTIL_EOF = "sys.stdin.read()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); [signal.pause() for _ in iter(int, 1)]"


def _command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _alive(url: str) -> bool:
    try:
        os.kill(int(url.rsplit(":", 1)[1]), 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_server_runs_as_long_as_its_context() -> None:
    """The child is up inside, in a session of its own, and gone after."""
    async with launched(_command(READY + UNTIL_EOF)) as url:
        assert _alive(url)
        pid = int(url.rsplit(":", 1)[1])
        assert os.getsid(pid) == pid
    assert not _alive(url)


async def test_a_server_that_ignores_everything_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """End of input and SIGTERM are ignored by it; SIGKILL is not."""
    monkeypatch.setattr("asyncrl.concurrency.children._CLOSE_S", 0.05)
    monkeypatch.setattr("asyncrl.concurrency.children._TERMINATE_S", 0.05)
    async with launched(_command(READY + STUBBORN)) as url:
        assert _alive(url)
    assert not _alive(url)


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (1, ServerUnavailable)])
async def test_an_early_end_is_an_error_with_the_last_lines(code: int, kind: type[Exception]) -> None:
    """The exit code decides whose fault it is, and the message has what the server said."""
    script = f"import sys; sys.stderr.write('no such folder: /models/x'); sys.exit({code})"
    with pytest.raises(kind, match=f"(?s)exit code {code}.*no such folder: /models/x"):
        async with launched(_command(script)):
            pass


async def test_a_server_that_is_never_ready_is_given_up() -> None:
    """Silence ends at the deadline, and the child is ended too."""
    with pytest.raises(ServerUnavailable, match=r"not ready in 0\.1 s"):
        async with launched(_command("import sys; sys.stdin.read()"), start_timeout_s=0.1):
            pass


async def test_other_words_than_the_ready_line_are_an_error() -> None:
    """Something else on standard output is quoted."""
    with pytest.raises(ServerUnavailable, match="hello"):
        async with launched(_command("import sys; print('hello', flush=True); sys.stdin.read()")):
            pass


async def test_an_error_after_the_server_failed_says_how_it_ended(tmp_path: Path) -> None:
    """Whoever notices that the server is gone also gets to know why."""
    script = READY + "sys.stderr.write('out of memory'); sys.exit(3)"
    with pytest.raises(RuntimeError, match="lost") as caught:
        async with launched(_command(script), log=tmp_path / "log"):
            raise RuntimeError("lost")
    assert "exit code 3" in caught.value.__notes__[0]
    assert "out of memory" in caught.value.__notes__[0]


def test_a_server_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves the parent no chance to clean up, and the child still ends."""
    log = tmp_path / "log"
    # A FIFO in the place of the log reaches its end when the last process that writes to it has ended: the server.
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    parent = f"""
import anyio
from pathlib import Path
from asyncrl.servers.launch import launched
async def main():
    async with launched({_command(READY + UNTIL_EOF)!r}, log=Path({str(log)!r})) as url:
        print(url, flush=True)
        await anyio.Event().wait()
anyio.run(main)
"""
    with subprocess.Popen(_command(parent), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert _alive(process.stdout.readline().strip())
        process.kill()
        os.set_blocking(reader, True)
        assert os.read(reader, 100) == b""
    os.close(reader)


def test_the_embedded_server_is_started_on_loopback_and_tied_to_this_process() -> None:
    """The command asks for a free port and for an end with standard input."""
    server = EmbeddedServer(Path("/models/x"), threads=3)
    options = "-m asyncrl serve --model /models/x --host 127.0.0.1 --port 0 --threads 3 --exit-with-stdin"
    assert server.command == (sys.executable, *options.split())
