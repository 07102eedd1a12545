"""Ways to rank 0: processes of our own on this machine, or ranks that somebody has started by torchrun.

Our own: one rank is a Python process, more are started by torchrun. Rank 0 connects to a Unix socket in a folder that
nobody else can enter. Others: rank 0 listens, and both sides show that they know the token before anything else is said
(HMAC-SHA256 of a nonce of the other's). What follows is not encrypted: it is meant for a private network or a tunnel.
"""

from __future__ import annotations

import hmac
import os
import secrets
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

from asyncrl.concurrency.children import Child, child_process
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learning.ranks.client import Connection, module_paths
from asyncrl.learning.ranks.frames import Frame

__all__ = ["HELLO_BYTES", "LocalRanks", "RemoteRanks", "proof", "read_token", "split_address"]

HELLO_BYTES = 4096
"""Of a frame before the other side has shown the token."""
_START_S = 300.0
# The first import of torch takes tens of seconds on a small machine; connecting comes before that.
_END_S = 15.0
_PATIENCE_S = 3.0
# Without a connection a rank ends by itself within a moment, and torchrun with it.
_CONNECT_S = 30.0
_LEAST_TOKEN = 16
_TORCHRUN = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLink:
    """A connection to ranks that are children of this process."""

    connection: Connection
    child: Child

    async def ended(self) -> None:
        """See ``Link``."""
        with anyio.move_on_after(_END_S):
            await self.child.process.wait()

    async def last_words(self) -> str:
        """See ``Link``."""
        with anyio.move_on_after(_END_S):
            return await self.child.how_it_ended(await self.child.process.wait())
        return await self.child.last_lines()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """``ranks`` processes on this machine, which end with the block.

    ``log``: file for what they print, None is a temporary one. ``timeout_s``: how long ranks wait for each other.
    ``threads``: of each.
    """

    ranks: int
    timeout_s: float
    threads: int | None = None
    log: Path | None = None

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[LocalLink, None]:
        """Start them; raises ``LearnerError`` or ``ConfigError`` if they end instead, with what they said."""
        async with anyio.TemporaryDirectory(prefix="asyncrl-ranks-") as folder:
            path = Path(folder) / "driver"
            async with (
                await anyio.create_unix_listener(path) as listener,
                child_process(
                    self._command(path),
                    name="the learner's process" if self.ranks == 1 else "torchrun, with the learner's ranks,",
                    log=self.log,
                    answers=False,
                    environment=self._environment(),
                    patience_s=_PATIENCE_S,
                ) as child,
            ):
                stream = await _accepted(listener, child)
                async with stream:
                    yield LocalLink(connection=Connection(stream), child=child)

    def _command(self, path: Path) -> list[str]:
        service = ["-m", "asyncrl.learning.ranks", "--connect", str(path), "--timeout-s", str(self.timeout_s)]
        if self.ranks == 1:
            return [sys.executable, *service]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [sys.executable, *torchrun, *service]

    def _environment(self) -> Mapping[str, str]:
        """Modules are found there as they are here: those of a user's losses too."""
        # Without what torchrun may have told this process about itself.
        ours = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
        # Several ranks with all processors each would be in each other's way; torch itself is told again when it loads.
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        return {**ours, "PYTHONPATH": os.pathsep.join(module_paths()), "PYTHONUNBUFFERED": "1", **threads}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLink:
    """A connection to ranks that others have started."""

    connection: Connection
    address: str

    async def ended(self) -> None:
        """See ``Link``. Nobody here sees them."""

    async def last_words(self) -> str:
        """See ``Link``."""
        return f"the connection to {self.address} is lost; what torchrun printed there says why"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRanks:
    """Ranks whose first listens at ``address``, "host:port"; ``token_file``: a secret that both sides know."""

    address: str
    token_file: Path

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[RemoteLink, None]:
        """Connect; raises ``LearnerError`` if nobody is there, or if it is somebody else."""
        host, port = split_address(self.address)
        token = await anyio.to_thread.run_sync(read_token, "model.token_file", self.token_file)
        try:
            with anyio.fail_after(_CONNECT_S):
                stream = await anyio.connect_tcp(host, port)
        except (OSError, TimeoutError) as error:
            raise LearnerError(
                f"no rank of the learner listens at model.address {self.address}: {error or 'no answer'}; start the "
                "ranks first"
            ) from error
        async with stream:
            connection = Connection(stream)
            await _greet(connection, token, self.address)
            yield RemoteLink(connection=connection, address=self.address)


def proof(token: bytes, nonce: str) -> str:
    """What only somebody with the token can say to ``nonce``."""
    return hmac.new(token, nonce.encode(), "sha256").hexdigest()


def read_token(key: str, file: Path) -> bytes:
    """The token in ``file``. Raises ``ConfigError`` naming ``key`` if there is none, or if it is too short."""
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError.for_value(key, str(file), f"a file with a secret: {error.strerror}") from error
    if len(token) < _LEAST_TOKEN:
        raise ConfigError.for_value(key, str(file), f"a file with at least {_LEAST_TOKEN} characters, not {len(token)}")
    return token


def split_address(address: str, key: str = "model.address") -> tuple[str, int]:
    """Host and port of ``host:port``. Raises ``ConfigError`` naming ``key``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError.for_value(key, address, "'host:port', where the first rank listens")
    return host.strip("[]"), int(port)


async def _accepted(listener: anyio.abc.SocketListener, child: Child) -> anyio.abc.SocketStream:
    """The connection of rank 0; raises what its end says if it ends before."""
    stream: anyio.abc.SocketStream | None = None
    has_ended = False
    with anyio.move_on_after(_START_S):
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                nonlocal has_ended
                await child.process.wait()
                has_ended = True
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            stream = await listener.accept()
            tasks.cancel_scope.cancel()
    if stream is not None:
        return stream
    if has_ended:
        raise await child.early_end(LearnerError)
    raise LearnerError(f"{child.name} was not ready in {_START_S:g} s; {await child.last_lines()}")


async def _greet(connection: Connection, token: bytes, address: str) -> None:
    """Show the token to rank 0, and see that it knows it too."""
    nonce = secrets.token_hex(16)
    try:
        with anyio.fail_after(_CONNECT_S):
            theirs: Any = (await connection.receive(most_bytes=HELLO_BYTES)).header.get("nonce")
            await connection.send(Frame(header={"proof": proof(token, f"driver {theirs}"), "nonce": nonce}))
            answer = (await connection.receive(most_bytes=HELLO_BYTES)).header.get("proof")
    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, TimeoutError, OSError) as error:
        raise LearnerError(
            f"the rank at model.address {address} ended the greeting: it has another token, or another driver"
        ) from error
    if not hmac.compare_digest(str(answer), proof(token, f"rank {nonce}")):
        raise LearnerError(f"who answers at model.address {address} does not know the token of model.token_file")
