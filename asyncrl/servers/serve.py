"""Serving the embedded server over HTTP, in this process."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager

import anyio
import orjson
import uvicorn

from asyncrl.errors import ConfigError
from asyncrl.servers.embedded.app import create_app
from asyncrl.servers.embedded.options import ServerOptions

__all__ = ["ServerOptions", "run_server"]

_SHUTDOWN_S = 5


def run_server(options: ServerOptions) -> None:
    """Serve until a signal, or until standard input ends with ``exit_with_stdin``.

    When the model is loaded and requests are taken, one JSON line with the URL goes to stdout; logs go to stderr.
    Raises ``ConfigError`` before the model is loaded if the port is in use.
    """
    with _bind(options.host, options.port) as listener:
        anyio.run(_serve, options, listener)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only for sockets that say that they are TCP; with it each reply takes 40 ms more.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Listening already, so that a second server on the port fails now and not when its model is loaded.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError.for_value("--port", port, f"a port of {host} that is free: {error.strerror}") from error
    return listener


async def _serve(options: ServerOptions, listener: socket.socket) -> None:
    app = create_app(options)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        # SGLang's value; clients expire their idle connections sooner.
        timeout_keep_alive=5,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        # Entered here, because uvicorn would go on serving without it if it failed.
        lifespan="off",
    )
    server = _UvicornServer(config, listener)
    async with app.router.lifespan_context(app), anyio.create_task_group() as tasks:
        tasks.start_soon(_until_signal, server)
        if options.exit_with_stdin:
            tasks.start_soon(_until_end_of_stdin, server)
        await server.serve(sockets=[listener])
        tasks.cancel_scope.cancel()


class _UvicornServer(uvicorn.Server):
    """Says when it is ready, which uvicorn only logs, and leaves signals to us: it would end the process by them."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        ready = {"ready": True, "url": f"http://{shown}:{port}", "pid": os.getpid()}
        sys.stdout.write(orjson.dumps(ready).decode() + "\n")
        sys.stdout.flush()


async def _until_signal(server: _UvicornServer) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            # The second one does not wait for requests that run.
            server.force_exit = server.should_exit
            server.should_exit = True


async def _until_end_of_stdin(server: _UvicornServer) -> None:
    # Not in a thread: one that waits for input cannot be ended, and would keep the process alive after a signal.
    descriptor = sys.stdin.fileno()
    while True:
        await anyio.wait_readable(descriptor)
        if not os.read(descriptor, 65_536):
            server.should_exit = True
            return
