"""DistributedCarrier: all weights, broadcast to all servers at once through a process group with us as rank 0.

NCCL between GPUs, gloo for parameters on a CPU. A group is kept from one publication to the next; it is made anew when
the set of servers changes, and one that failed is left. If the broadcast to all fails, each server is served by itself,
so that one that is dead does not cost the others. Every phase has a time limit, and no torch call runs on the event
loop or in the learner's thread.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from asyncrl.errors import PublicationError, SamplingError
from asyncrl.learning.base import Learner
from asyncrl.publishing.base import BUCKET_BYTES
from asyncrl.publishing.carriers import is_local, plan
from asyncrl.publishing.delivery import JointUpdate
from asyncrl.publishing.staging import Copies
from asyncrl.sampling.control import ServerControl

__all__ = ["DistributedCarrier", "OpenGroup", "ProcessGroup"]

_LEAVE_S = 5.0


class ProcessGroup(Protocol):
    """Rank 0's side of a process group; its calls block. Real: ``TorchGroup``. Tests: one that sends nothing."""

    def join(self) -> None:
        """Return when all ranks have joined."""
        ...

    def broadcast(self, flat: Any) -> None:
        """Send a flat tensor to the others."""
        ...

    def close(self) -> None:
        """Leave; who still waits for us gets an error."""
        ...


class OpenGroup(Protocol):
    """Makes a group whose others meet us at ``listener``; blocks, but not for long."""

    def __call__(
        self, listener: socket.socket, *, name: str, backend: str, world_size: int, timeout_s: float
    ) -> ProcessGroup:
        """A group of ``world_size`` ranks that is not joined yet; its calls take at most ``timeout_s``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Joined:
    """A group that all its servers have joined."""

    group: ProcessGroup
    name: str
    servers: tuple[ServerControl, ...]


class DistributedCarrier:
    """Broadcasts buckets of at most ``bucket_bytes`` to every server.

    ``phase_s``: limit of each phase: waiting for all servers to be paused, joining, one bucket.
    ``open_group``: None is torch's.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        phase_s: float,
        bucket_bytes: int = BUCKET_BYTES,
        open_group: OpenGroup | None = None,
    ) -> None:
        self.store = Copies(learner)
        self._phase_s = phase_s
        self._bucket_bytes = bucket_bytes
        self._open_group = open_group or _torch_group
        self._groups: dict[frozenset[str], _Joined] = {}
        # A thread that waits for a dead server holds its place only as long as somebody waits for it.
        self._limiter = anyio.CapacityLimiter(8)

    async def update(self, server: ServerControl, version: int, label: str, together: JointUpdate) -> None:
        """Broadcast the weights of ``version`` to ``server`` and all others that are ready meanwhile."""
        if together.returning:
            # It may be another process than the one that joined.
            await self._disband_all_with({server.url})
        await together.serve_all(server, partial(self._serve, version, label), patience_s=self._phase_s)

    async def close(self) -> None:
        """Leave all groups."""
        await self._disband_all_with({url for servers in self._groups for url in servers})

    async def _serve(self, version: int, label: str, servers: list[ServerControl]) -> Mapping[str, Exception]:
        failures: dict[str, Exception] = {}

        async def alone(server: ServerControl) -> None:
            try:
                await self._send(version, label, [server])
            except PublicationError as error:
                failures[server.url] = error

        if len(servers) > 1:
            with suppress(PublicationError):
                await self._send(version, label, servers)
                return {}
        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(alone, server)
        return failures

    async def _send(self, version: int, label: str, servers: Sequence[ServerControl]) -> None:
        weights = self.store.weights(version)
        key = frozenset(server.url for server in servers)
        try:
            device = self.store.device
            backend = "gloo" if device is None else "nccl"
            parts = await self._blocking("a plan", partial(plan, weights, self._bucket_bytes))
            joined = self._groups.get(key) or await self._join(servers, backend)
            await self._all("begin_weight_update", servers, lambda server: server.begin_update())
            for number, names in enumerate(parts, start=1):
                bucket = await self._blocking("a bucket", partial(_bucket, weights, names, device))
                receive = partial(_receive, joined.name, bucket, label if number == len(parts) else None)
                broadcast = partial(joined.group.broadcast, bucket.flat)
                await self._all("a broadcast", servers, receive, beside=broadcast)
            await self._all("end_weight_update", servers, lambda server: server.end_update())
        except BaseException:
            await self._disband(key)
            raise

    async def _join(self, servers: Sequence[ServerControl], backend: str) -> _Joined:
        """A new group with these servers; they leave the ones that they were in."""
        key = frozenset(server.url for server in servers)
        await self._disband_all_with(key)
        # A name is never used twice: a server may still be in the group of that name.
        name = f"asyncrl-{uuid.uuid4().hex[:12]}"
        ranks: dict[str, int] = {}

        async def count(server: ServerControl) -> None:
            ranks[server.url] = await server.tensor_ranks()

        await self._all("server_info", servers, count)
        first = {server.url: 1 + sum(ranks[s.url] for s in servers[:i]) for i, server in enumerate(servers)}
        world_size = 1 + sum(ranks.values())
        opened = partial(
            _listen_and_open,
            self._open_group,
            [server.url for server in servers],
            name=name,
            backend=backend,
            world_size=world_size,
            timeout_s=self._phase_s,
        )
        group, address, port = await self._blocking("a process group", opened)
        self._groups[key] = joined = _Joined(group=group, name=name, servers=tuple(servers))

        async def join(server: ServerControl) -> None:
            await server.join_group(
                name=name,
                address=address,
                port=port,
                first_rank=first[server.url],
                world_size=world_size,
                backend=backend,
            )

        await self._all("joining a process group", servers, join, beside=group.join)
        return joined

    async def _disband_all_with(self, urls: Set[str]) -> None:
        for servers in [servers for servers in self._groups if servers & urls]:
            await self._disband(servers)

    async def _disband(self, servers: frozenset[str]) -> None:
        """Leave a group, if there is one: first ourselves, which frees servers that wait in it."""
        joined = self._groups.pop(servers, None)
        if joined is None:
            return

        async def leave(server: ServerControl) -> None:
            with suppress(SamplingError):
                await server.leave_group(joined.name)

        with anyio.CancelScope(shield=True), anyio.move_on_after(_LEAVE_S):
            await anyio.to_thread.run_sync(joined.group.close, abandon_on_cancel=True, limiter=self._limiter)
            async with anyio.create_task_group() as tasks:
                for server in joined.servers:
                    tasks.start_soon(leave, server)

    async def _blocking(self, what: str, function: Callable[[], Any]) -> Any:
        """Run something of torch in a thread, which is left to itself if it takes too long."""
        try:
            with anyio.fail_after(self._phase_s):
                return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._limiter)
        except TimeoutError as error:
            raise PublicationError(f"{what} took more than {self._phase_s:g} s") from error
        except (RuntimeError, OSError) as error:
            # All that torch raises about other processes is a RuntimeError.
            raise PublicationError(f"{what} failed: {error}") from error

    async def _all(
        self,
        what: str,
        servers: Iterable[ServerControl],
        call: Callable[[ServerControl], Awaitable[None]],
        *,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """``call`` each server at the same time, and ``beside`` in a thread; the first failure ends it for all."""
        failures: list[Exception] = []

        async def guarded(run: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
            try:
                await run()
            except (SamplingError, PublicationError) as error:
                failures.append(error)
                scope.cancel()

        with anyio.move_on_after(self._phase_s) as limit:
            async with anyio.create_task_group() as tasks:
                for server in servers:
                    tasks.start_soon(guarded, partial(call, server), tasks.cancel_scope)
                if beside is not None:
                    tasks.start_soon(guarded, partial(self._blocking, what, beside), tasks.cancel_scope)
        if failures:
            raise PublicationError(f"{what}: {failures[0]}") from failures[0]
        if limit.cancelled_caught:
            raise PublicationError(f"{what} took more than {self._phase_s:g} s")


async def _receive(group: str, bucket: Any, label: str | None, server: ServerControl) -> None:
    await server.update_from_group(group, names=bucket.names, dtypes=bucket.dtypes, shapes=bucket.shapes, label=label)


def _bucket(weights: Mapping[str, Any], names: Sequence[str], device: str | None) -> Any:
    from asyncrl.publishing.torch_buckets import as_tensors, make_bucket

    return make_bucket(as_tensors(weights), names, device)


def _torch_group(
    listener: socket.socket, *, name: str, backend: str, world_size: int, timeout_s: float
) -> ProcessGroup:
    from asyncrl.publishing.torch_group import TorchGroup

    return TorchGroup(listener, name=name, backend=backend, world_size=world_size, timeout_s=timeout_s)


def _listen_and_open(
    open_group: OpenGroup, urls: Sequence[str], *, name: str, backend: str, world_size: int, timeout_s: float
) -> tuple[ProcessGroup, str, int]:
    """A new group, and the address and port where servers find it."""
    listener = socket.create_server((_own_address(urls), 0))
    address, port = listener.getsockname()[:2]
    group = open_group(listener, name=name, backend=backend, world_size=world_size, timeout_s=timeout_s)
    return group, address, port


def _own_address(urls: Sequence[str]) -> str:
    """The address under which the servers reach this machine; loopback if they are all on it."""
    away = next((url for url in urls if not is_local(url)), None)
    if away is None:
        return "127.0.0.1"
    parts = urlsplit(away)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # No packet is sent: this only asks which of our addresses leads there.
        try:
            probe.connect((parts.hostname, parts.port or 80))
        except OSError as error:
            raise OSError(f"no address of ours leads to {away}: {error}") from error
        return str(probe.getsockname()[0])
