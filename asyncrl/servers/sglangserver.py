"""Real SGLang servers of our own: started, watched, started again when they die, and ended with us.

SGLang is several processes; a supervisor (``supervise.py``) holds them together and ends them all however this process
ends. A server that is started again has its old URL and the model's own weights: the client finds out, and gives it no
request before it was brought to the current policy.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import anyio
import anyio.to_thread
import httpx
import orjson

from asyncrl.concurrency.children import Child, child_process
from asyncrl.errors import ConfigError, SamplingError, ServerUnavailable
from asyncrl.events import Events, Notice
from asyncrl.learning.base import model_vocab_size
from asyncrl.learning.modelfolder import find_model
from asyncrl.sampling.control import ServerControl, ask
from asyncrl.sampling.transport import TRANSPORT_ERRORS, open_client
from asyncrl.servers.sglangcommand import Command, Machine, SGLangOptions, plan_here, split_gpus

__all__ = ["LaunchedServers", "Plan", "SGLangServer", "free_ports", "running", "server_url"]

Plan: TypeAlias = Callable[[SGLangOptions], Command]
"""From options to a command; may read the disk."""

_SUPERVISOR = Path(__file__).with_name("supervise.py")
_FIRST_LOOK_S = 0.1
_LONGEST_LOOK_S = 1.0
# SGLang tells nobody that it is ready, so it is asked; each time a little later.
_LONGEST_ANSWER_S = 10.0
_RESTARTS = 5
_STABLE_S = 120.0
_FIRST_BACK_OFF_S = 1.0
_LONGEST_BACK_OFF_S = 60.0
_FIRST_PORT, _END_OF_PORTS = 20_000, 32_000
# Below those that systems give to outgoing connections, which could take one while the server loads its model.


class SGLangServer:
    """A real SGLang server on this machine.

    ``log``: file for what it prints, None is a temporary one; keys are hidden in it. ``plan``: replaces how the command
    is made, for tests. If the server dies while in use, it is started again up to five times in succession.

    Raises ``ConfigError`` for options that this machine or SGLang does not take, and for a version that is not known to
    work; ``ServerUnavailable`` if it ends or is silent instead of starting. ``events`` get a ``Notice`` each time:
    ``server_started``, ``server_exited``, ``server_given_up``.
    """

    def __init__(self, options: SGLangOptions, *, log: Path | None = None, plan: Plan | None = None) -> None:
        self.events = Events()
        self.options = replace(options, port=options.port or free_ports(1)[0])
        """With the port that is used."""
        self.url = server_url(self.options)
        self._log = log
        self._plan = plan or plan_here

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[str, None]:
        """Start it; its URL, as soon as it answers."""
        command = await anyio.to_thread.run_sync(self._plan, self.options)
        async with running(command, self.options, log=self._log) as child:
            self._notice("server_started", level="info")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, child, command)
                yield self.url
                tasks.cancel_scope.cancel()

    async def _watch(self, child: Child, command: Command) -> None:
        """Report the end of the server and start it again, until that fails too often in succession."""
        await self._report_end(child)
        failures = 0
        while failures < _RESTARTS:
            await anyio.sleep(min(_FIRST_BACK_OFF_S * 2.0**failures, _LONGEST_BACK_OFF_S))
            failures += 1
            try:
                async with running(command, self.options, log=self._log) as again:
                    started = anyio.current_time()
                    self._notice("server_started", level="info")
                    await self._report_end(again)
            except (SamplingError, ConfigError) as error:
                self._notice("server_exited", reason=str(error))
            else:
                if anyio.current_time() - started >= _STABLE_S:
                    failures = 0
        self._notice("server_given_up", level="error", restarts=failures)

    async def _report_end(self, child: Child) -> None:
        code = await child.process.wait()
        self._notice("server_exited", exit_code=code, reason=await child.last_lines())

    def _notice(self, name: str, *, level: str = "warning", **keys: object) -> None:
        keys = {"url": self.url, **keys}
        self.events.emit(Notice(time=anyio.current_time(), name=name, level=level, keys=keys))


class LaunchedServers:
    """Real SGLang servers on this machine, as a source of URLs: they start together and end with the block.

    ``options``: of each; with GPUs, each server gets ``tensor_parallel`` of its own. ``servers``: how many.
    ``log_directory``: gets ``sglang-0.log`` and so on, None: temporary files. ``events`` are those of all servers.
    ``plan`` and ``machine`` replace how commands are made and this machine, for tests.
    """

    starts_servers = True

    def __init__(
        self,
        options: SGLangOptions,
        *,
        servers: int = 1,
        log_directory: Path | None = None,
        plan: Plan | None = None,
        machine: Machine | None = None,
    ) -> None:
        if servers < 1 or (servers > 1 and options.port):
            raise ConfigError.for_value("servers", servers, "1 or more, and more than 1 only with port=0")
        self.events = Events()
        self.options = options
        self.servers = servers
        self._log_directory = log_directory
        self._plan = plan
        self._machine = machine

    @property
    def vocab_size(self) -> int:
        """Of their model. Raises ``ConfigError`` if there is none, or if its folder does not say."""
        return model_vocab_size(find_model(self.options.model))

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Sequence[str], None]:
        """Start the servers; their URLs when all of them answer."""
        servers = await anyio.to_thread.run_sync(self._make)
        pending = set(range(len(servers)))
        up = anyio.Event()

        async def run(index: int) -> None:
            async with servers[index].opened():
                pending.discard(index)
                if not pending:
                    up.set()
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            for index in pending:
                tasks.start_soon(run, index)
            await up.wait()
            yield tuple(server.url for server in servers)
            tasks.cancel_scope.cancel()

    def _make(self) -> list[SGLangServer]:
        count = self.servers
        ports = [self.options.port] if self.options.port else free_ports(count)
        gpus = split_gpus(self.options, self._machine or Machine.found(), count)
        found = []
        for index, (port, own) in enumerate(zip(ports, gpus, strict=True)):
            log = None if self._log_directory is None else self._log_directory / f"sglang-{index}.log"
            server = SGLangServer(replace(self.options, port=port, gpus=own), log=log, plan=self._plan)
            server.events.subscribe(self.events.emit)
            found.append(server)
        return found


@asynccontextmanager
async def running(
    command: Command, options: SGLangOptions, *, log: Path | None = None, to_stderr: bool = False
) -> AsyncGenerator[Child, None]:
    """The server's process (its supervisor), as soon as it takes requests. Errors as those of ``SGLangServer``."""
    async with anyio.TemporaryDirectory(prefix="asyncrl-sglang-") as folder:
        arguments = [*command.arguments]
        if command.secrets:
            # The folder is readable by its owner only. YAML is asked for, and JSON is YAML.
            path = anyio.Path(folder) / "keys.yaml"
            await path.write_bytes(orjson.dumps(dict(command.secrets)))
            arguments += ["--config", str(path)]
        task = {
            "command": arguments,
            "environment": dict(command.environment),
            "secrets": list(command.secrets.values()),
        }
        supervised = [sys.executable, str(_SUPERVISOR)]
        line = orjson.dumps(task) + b"\n"
        name = "the SGLang server"
        async with child_process(supervised, name=name, log=log, first_line=line, to_stderr=to_stderr) as child:
            await _until_ready(child, options)
            yield child


async def _until_ready(child: Child, options: SGLangOptions) -> None:
    """Return when the server is ready, or raise the reason why it will not be."""
    ended = False
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            nonlocal ended
            await child.process.wait()
            ended = True
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        with anyio.move_on_after(options.start_timeout_s) as limit:
            await _until_answer(options)
        tasks.cancel_scope.cancel()
    if ended:
        raise await child.early_end()
    if limit.cancelled_caught:
        last = await child.last_lines()
        raise ServerUnavailable(f"{child.name} was not ready in {options.start_timeout_s:g} s; {last}")
    await _require_version(options)


async def _until_answer(options: SGLangOptions) -> None:
    """Ask until it is ready. Not ``/health``: SGLang answers that by sampling, and takes it ill if it is late."""
    wait_s = _FIRST_LOOK_S
    async with open_client() as client:
        while not await _is_ready(client.get(server_url(options) + "/ready")):
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_LOOK_S)


async def _require_version(options: SGLangOptions) -> None:
    async with open_client() as client:
        server = ServerControl(client, server_url(options), api_key=options.api_key, admin_key=options.admin_key)
        await ask(server, allow_version=options.allow_version)


async def _is_ready(answer: Awaitable[httpx.Response]) -> bool:
    with anyio.move_on_after(_LONGEST_ANSWER_S):
        try:
            return (await answer).status_code == 200
        except TRANSPORT_ERRORS:
            return False
    return False


def server_url(options: SGLangOptions) -> str:
    """Where a server with these options is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    return f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now. Servers bind theirs much later, so others may still be faster."""
    found: list[int] = []
    for port in random.sample(range(_FIRST_PORT, _END_OF_PORTS), _END_OF_PORTS - _FIRST_PORT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ServerUnavailable(f"there are no {count} free ports between {_FIRST_PORT} and {_END_OF_PORTS}")
