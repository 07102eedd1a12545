"""Rank 0's side of the connection: plain sockets and threads, for the main thread is busy computing.

A thread reads what the driver sends, and ends this process when the connection ends: without a driver there is nothing
to do, and the other ranks end with this one. Another says every few seconds that the rank is at work.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from asyncrl.learning.ranks.frames import Frame, FrameError, read_frame
from asyncrl.learning.ranks.launch import HELLO_BYTES, proof

__all__ = ["DriverLink", "die_with_parent"]

_ALIVE_S = 5.0
_GREETING_S = 10.0
_PR_SET_PDEATHSIG = 1
_DRIVER_GONE = 3


def die_with_parent() -> None:
    """Have the kernel end this process when torchrun, or the driver, is killed. Linux only, elsewhere the connection
    has to do.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class DriverLink:
    """Owns the socket. ``requests`` is what the driver has asked for, in order."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._is_closing = False
        self._is_busy = threading.Event()
        self.requests: SimpleQueue[Frame] = SimpleQueue()
        for task in (self._read, self._say_alive):
            threading.Thread(target=task, daemon=True).start()

    @classmethod
    def connected(cls, path: Path) -> DriverLink:
        """To the driver that started this process."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    @classmethod
    def accepted(cls, host: str, port: int, token: bytes) -> DriverLink:
        """Wait for a driver that knows ``token``; others are sent away."""
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            print(f"rank 0 waits for the driver on {host}:{server.getsockname()[1]}", file=sys.stderr, flush=True)
            while True:
                connection, peer = server.accept()
                connection.settimeout(_GREETING_S)
                try:
                    if _greets(connection, token):
                        connection.settimeout(None)
                        return cls(connection)
                except (OSError, FrameError) as error:
                    print(f"{peer[0]} is no driver: {error}", file=sys.stderr, flush=True)
                connection.close()

    def send(self, frame: Frame) -> None:
        """To the driver. A driver that is gone ends this process in another thread."""
        encoded = frame.encoded()
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(encoded)

    def next_request(self) -> Frame:
        """Wait for it; until the next call of this method the driver hears that the rank is at work."""
        self._is_busy.clear()
        request = self.requests.get()
        self._is_busy.set()
        return request

    def fail(self, text: str) -> None:
        """Tell the driver that all is over, and end this process: torchrun ends the other ranks."""
        self.send(Frame(header={"failed": text}))
        sys.stderr.flush()
        os._exit(1)

    def close(self) -> None:
        """After the driver has asked for the end."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                request = read_frame(self._receive)
                self._is_closing = request.header.get("method") == "close"
                self.requests.put(request)
        except (OSError, FrameError) as error:
            if self._is_closing:
                return
            print(f"rank 0 ends, for the driver is gone: {error}", file=sys.stderr, flush=True)
            # At once: the main thread may be in the middle of a step that nobody wants any more.
            os._exit(_DRIVER_GONE)

    def _receive(self, count: int) -> bytes:
        return _receive(self._connection, count)

    def _say_alive(self) -> None:
        while True:
            self._is_busy.wait()
            self.send(Frame(header={"alive": True}))
            time.sleep(_ALIVE_S)


def _greets(connection: socket.socket, token: bytes) -> bool:
    """Both sides show that they know the token; false if the other does not."""
    nonce = secrets.token_hex(16)
    connection.sendall(Frame(header={"nonce": nonce}).encoded())
    hello: Any = read_frame(lambda count: _receive(connection, count), most_bytes=HELLO_BYTES).header
    if not hmac.compare_digest(str(hello.get("proof")), proof(token, f"driver {nonce}")):
        return False
    connection.sendall(Frame(header={"proof": proof(token, f"rank {hello.get('nonce')}")}).encoded())
    return True


def _receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    view = memoryview(received)
    while view:
        read = connection.recv_into(view)
        if read == 0:
            raise ConnectionResetError("the connection has ended")
        view = view[read:]
    return bytes(received)
