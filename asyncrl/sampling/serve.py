"""Serving the embedded server over HTTP, in this process."""

from __future__ import annotations

import socket
import sys

import anyio
import orjson
import uvicorn

from asyncrl.errors import ConfigError
from asyncrl.sampling.embedded.app import ServerOptions, create_app

__all__ = ["ServerOptions", "run_server"]


def run_server(options: ServerOptions) -> None:
    """Serve until a signal, or until standard input ends with ``exit_with_stdin``.

    When the model is loaded and requests are taken, one JSON line with the URL goes to stdout; logs go to stderr.
    Raises ``ConfigError`` before the model is loaded if the port is in use.
    """
    with _bind(options.host, options.port) as listener:
        anyio.run(_serve, options, listener)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
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
    config = uvicorn.Config(
        create_app(options),
        log_config=None,
        access_log=False,
        # SGLang's value; clients expire their idle connections sooner.
        timeout_keep_alive=5,
        lifespan="on",
    )
    server = _Server(config, listener)
    async with anyio.create_task_group() as tasks:
        if options.exit_with_stdin:
            tasks.start_soon(_until_end_of_stdin, server)
        await server.serve(sockets=[listener])
        tasks.cancel_scope.cancel()
    if not server.started:
        raise SystemExit(1)


class _Server(uvicorn.Server):
    """Says when it is ready: uvicorn itself only logs it."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        sys.stdout.write(orjson.dumps({"ready": True, "url": f"http://{shown}:{port}"}).decode() + "\n")
        sys.stdout.flush()


async def _until_end_of_stdin(server: _Server) -> None:
    await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
    server.should_exit = True
