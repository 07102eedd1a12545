"""Real servers as processes: start, watch, restart, end. A small stand-in takes SGLang's place."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncrl.errors import ConfigError, ServerUnavailable
from asyncrl.events import Event, Notice
from asyncrl.sampling.sglang import SGLang
from asyncrl.servers import sglangserver
from asyncrl.servers.sglangcommand import Command, Machine, SGLangOptions
from asyncrl.servers.sglangserver import LaunchedServers, SGLangServer, free_ports, server_url

pytestmark = pytest.mark.slow

# Like SGLang it answers, has a child of its own and says its options; and it ends with an exit code on request.
STAND_IN = r"""
import http.server, json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/die/"):
            os._exit(int(self.path[5:]))
        body = {"version": VERSION, "pids": [os.getpid(), child.pid], "argv": sys.argv, "weight_version": "default"}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *arguments):
        pass
VERSION = os.environ.get("STAND_IN_VERSION", "0.5.23")
print("server_args", [open(a).read() for a in sys.argv if a.endswith(".yaml")], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def _plan(script: str = STAND_IN, **environment: str) -> Callable[[SGLangOptions], Command]:
    def plan(options: SGLangOptions) -> Command:
        keys = {"api-key": options.api_key, "admin-api-key": options.admin_key}
        return Command(
            arguments=(sys.executable, "-c", script, str(options.port)),
            environment=environment,
            secrets={name: key for name, key in keys.items() if key},
        )

    return plan


def _options(**changes: Any) -> SGLangOptions:
    return SGLangOptions(**{"model": Path("/models/x"), "start_timeout_s": 60.0, **changes})


def _alive(pid: int) -> bool:
    """True if the process runs; one that ended and was not collected by its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def _gone(pids: list[int]) -> None:
    """Return when none of the processes runs; a kill takes a moment to be carried out."""
    with anyio.fail_after(60):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                await anyio.wait_readable(descriptor)
                os.close(descriptor)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


def _read(path: Path | str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _exists_for_others(path: Path | str) -> tuple[bool, bool]:
    """Whether ``path`` exists, and whether its folder opens for others than its owner."""
    folder = Path(path).parent
    return Path(path).exists(), folder.exists() and folder.stat().st_mode & 0o077 != 0


async def _info(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        found: dict[str, Any] = (await client.get(url + "/model_info")).json()
        return found


async def _kill_by_exit(url: str, code: int) -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"{url}/die/{code}")


async def test_a_server_runs_as_long_as_its_context() -> None:
    """It answers inside; after it neither the server nor a process that it started is left."""
    async with SGLangServer(_options(), plan=_plan()).opened() as url:
        pids = (await _info(url))["pids"]
        assert all(_alive(pid) for pid in pids)
    assert not any(_alive(pid) for pid in pids)


async def test_keys_reach_the_server_in_a_private_file_and_are_hidden_in_its_log(tmp_path: Path) -> None:
    """The server prints its options; the log has them without the keys. The file is gone with the server."""
    log = tmp_path / "log"
    server = SGLangServer(_options(api_key="hush-1", admin_key="quiet-2"), log=log, plan=_plan())
    async with server.opened() as url:
        arguments = (await _info(url))["argv"]
        assert arguments[2] == "--config"
        assert _read(arguments[3]) == '{"api-key":"hush-1","admin-api-key":"quiet-2"}'
        assert _exists_for_others(arguments[3]) == (True, False)
    text = _read(log)
    assert "[hidden]" in text
    assert "hush-1" not in text
    assert "quiet-2" not in text
    assert _exists_for_others(arguments[3]) == (False, False)


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (1, ServerUnavailable), (-9, ServerUnavailable)])
async def test_an_early_end_is_an_error_with_the_last_lines(code: int, kind: type[Exception]) -> None:
    """Exit code 2 is SGLang's for wrong arguments; a signal is told as a shell does."""
    end = f"os.kill(os.getpid(), {-code})" if code < 0 else f"sys.exit({code})"
    script = f"import os, sys; sys.stderr.write('no such thing: --x'); sys.stderr.flush(); {end}"
    shown = code if code > 0 else 128 - code
    with pytest.raises(kind, match=f"(?s)SGLang server ended with exit code {shown}.*no such thing: --x"):
        async with SGLangServer(_options(), plan=_plan(script)).opened():
            pass


async def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    """At the deadline it is ended, with all its processes."""
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(ServerUnavailable, match=r"not ready in 3 s"):
        async with SGLangServer(_options(start_timeout_s=3.0), plan=_plan(script)).opened():
            pass
    assert not _alive(int(_read(tmp_path / "pid")))


async def test_an_unknown_version_is_refused() -> None:
    """With what is known to work, and the way round it."""
    with pytest.raises(ConfigError, match=r"'0\.6\.0'; known to work are 0\.5\.23.*allow_version"):
        async with SGLangServer(_options(), plan=_plan(STAND_IN_VERSION="0.6.0")).opened():
            pass
    async with SGLangServer(_options(allow_version=True), plan=_plan(STAND_IN_VERSION="0.6.0")).opened() as url:
        assert url


async def test_a_server_that_dies_is_reported_and_started_again_at_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice has the exit code; the new one is another process with the same URL."""
    monkeypatch.setattr(sglangserver, "_FIRST_BACK_OFF_S", 0.01)
    server = SGLangServer(_options(), plan=_plan())
    seen: list[Notice] = []
    started = anyio.Event()

    def observe(event: Event) -> None:
        assert isinstance(event, Notice)
        seen.append(event)
        if [notice.name for notice in seen].count("server_started") == 2:
            started.set()

    server.events.subscribe(observe)
    async with server.opened() as url:
        first = (await _info(url))["pids"]
        await _kill_by_exit(url, 7)
        with anyio.fail_after(60):
            await started.wait()
        second = (await _info(url))["pids"]
        assert not set(first) & set(second)
        await _gone(first)
    assert [notice.name for notice in seen] == ["server_started", "server_exited", "server_started"]
    assert seen[1].keys["exit_code"] == 7
    assert seen[1].keys["url"] == url
    assert "server_args" in str(seen[1].keys["reason"])


async def test_restarts_that_fail_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that cannot start any more is given up after some attempts, and the run is told."""
    monkeypatch.setattr(sglangserver, "_FIRST_BACK_OFF_S", 0.01)
    monkeypatch.setattr(sglangserver, "_RESTARTS", 2)
    flag = tmp_path / "broken"
    script = f"import os, sys\nif os.path.exists({str(flag)!r}): sys.exit(3)\n{STAND_IN}"
    server = SGLangServer(_options(), plan=_plan(script))
    seen: list[str] = []
    given_up = anyio.Event()

    def observe(event: Event) -> None:
        assert isinstance(event, Notice)
        seen.append(event.name)
        if event.name == "server_given_up":
            given_up.set()

    server.events.subscribe(observe)
    async with server.opened() as url:
        flag.touch()
        await _kill_by_exit(url, 7)
        with anyio.fail_after(60):
            await given_up.wait()
    assert seen == ["server_started", "server_exited", "server_exited", "server_exited", "server_given_up"]


@pytest.mark.parametrize("victim", ["parent", "supervisor", "server"])
async def test_no_process_is_left_however_it_ends(victim: str) -> None:
    """SIGKILL leaves nobody a chance to clean up: not us, not the supervisor, not the server's first process."""
    script = f"""
import anyio, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.servers.test_sglang_server import _info, _options, _plan
from asyncrl.servers.sglangserver import SGLangServer
async def main():
    async with SGLangServer(_options(), plan=_plan()).opened() as url:
        print(*(await _info(url))["pids"], flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""
    async with await anyio.open_process([sys.executable, "-c", script], stderr=None) as parent:
        try:
            assert parent.stdout is not None
            with anyio.fail_after(60):
                line = await BufferedByteReceiveStream(parent.stdout).receive_until(b"\n", 1000)
            pids = [int(word) for word in line.split()]
            supervisor = _parent(pids[0])
            os.kill({"parent": parent.pid, "supervisor": supervisor, "server": pids[0]}[victim], signal.SIGKILL)
            if victim == "supervisor":
                # The kernel ends the server's first process; what that leaves behind sees to itself, as SGLang's does.
                await _gone(pids[:1])
                os.kill(pids[1], signal.SIGKILL)
            await _gone(pids)
        finally:
            with contextlib.suppress(ProcessLookupError):
                parent.kill()
    await _gone([supervisor, *pids])


async def test_several_servers_start_together_as_a_source_of_urls(tmp_path: Path) -> None:
    """Each has a port and a log of its own; their notices come through one place."""
    seen: list[object] = []
    machine = Machine(interpreter=Path(sys.executable), has_sglang=True, installed=None, gpus=())
    source = LaunchedServers(_options(), servers=2, log_directory=tmp_path, plan=_plan(), machine=machine)
    source.events.subscribe(seen.append)
    async with source.opened() as urls:
        assert len(set(urls)) == 2
        pids = [pid for url in urls for pid in (await _info(url))["pids"]]
        assert len(set(pids)) == 4
    await _gone(pids)
    assert all("server_args" in _read(tmp_path / name) for name in ("sglang-0.log", "sglang-1.log"))
    assert len(seen) == 2


async def test_one_server_that_cannot_start_ends_the_others() -> None:
    """The error is that one's, and nothing is left running."""
    ports: list[int] = []

    def plan(options: SGLangOptions) -> Command:
        ports.append(options.port)
        return _plan(STAND_IN if len(ports) == 1 else "import sys; sys.exit(2)")(options)

    machine = Machine(interpreter=Path(sys.executable), has_sglang=True, installed=None, gpus=())
    with pytest.RaisesGroup(ConfigError, flatten_subgroups=True):
        async with LaunchedServers(_options(), servers=2, plan=plan, machine=machine).opened():
            pass
    for port in ports:
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://127.0.0.1:{port}/model_info")


def test_launch_makes_a_sampler_of_its_own_servers(tiny_model: Callable[..., Path]) -> None:
    """It knows the model's vocabulary, waits for restarts, and says that it takes long to open."""
    sampler = SGLang.launch(SGLangOptions(model=tiny_model(), start_timeout_s=77.0), servers=2)
    assert sampler.starts_servers
    assert sampler.vocab_size == 64
    assert sampler.timeouts.outage_s == 77.0
    with pytest.raises(ConfigError, match="there is no folder"):
        SGLang.launch("/models/missing")


def test_ports_are_different_and_free() -> None:
    """A server that binds one of them right away succeeds."""
    ports = free_ports(50)
    assert len(set(ports)) == 50
    with pytest.raises(ConfigError, match="servers is 2"):
        LaunchedServers(_options(port=ports[0]), servers=2)


def test_the_url_of_a_server_that_listens_everywhere_is_local() -> None:
    """An address to listen on is none to connect to."""
    assert server_url(_options(port=1, host="0.0.0.0", api_key="k")) == "http://127.0.0.1:1"
    assert server_url(_options(port=1, host="::1")) == "http://[::1]:1"


def test_a_supervisor_that_is_told_to_end_reports_no_failure() -> None:
    """Its exit code is the command's only if that ended by itself."""
    supervisor = Path(sglangserver.__file__).with_name("supervise.py")
    for script, signalled, code in (("import time; time.sleep(60)", True, 0), ("import sys; sys.exit(5)", False, 5)):
        task = f'{{"command": ["{sys.executable}", "-c", "{script}"], "environment": {{}}, "secrets": []}}\n'
        with subprocess.Popen([sys.executable, str(supervisor)], stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(task.encode())
            process.stdin.flush()
            if signalled:
                process.stdin.close()
            assert process.wait(60) == code
