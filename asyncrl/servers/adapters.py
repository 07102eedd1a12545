"""The adapters of one of our own servers: which are loaded, who uses them, and which could be loaded again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeAlias, TypeVar

import anyio

from asyncrl.concurrency.notifier import Notifier
from asyncrl.servers.wireserver import WireError, adapter_error, bad_value

__all__ = ["AdapterSource", "Adapters", "LoadedAdapter"]

W = TypeVar("W")
AdapterSource: TypeAlias = str | Sequence[bytes]
"""The path of a folder, or the tensors that came in a request."""

_IN_BODY = "__tensor__"
# What SGLang says is the path of an adapter that came in a request.


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedAdapter(Generic[W]):
    """An adapter in memory. ``uid`` tells apart two loads under one name, so that they never share KV."""

    weights: W
    path: str
    uid: int
    users: int = 0


class Adapters(Generic[W]):
    """SGLang's rules of adapters. ``read(source)`` raises ``OSError``, ``ValueError`` or ``KeyError``."""

    def __init__(self, read: Callable[[AdapterSource], Awaitable[W]]) -> None:
        self._read = read
        self._loaded: dict[str, LoadedAdapter[W]] = {}
        self._known: dict[str, str] = {}
        # Every adapter ever loaded: a request that names an unloaded one loads it again.
        self._uids = count(1)
        self._one_change = anyio.Lock()
        # Also while an unload waits for the requests that use the adapter.
        self._unused = Notifier()

    @property
    def paths(self) -> dict[str, str]:
        """Name to path of the loaded adapters."""
        return {name: adapter.path for name, adapter in self._loaded.items()}

    def hold(self, adapters: Mapping[str, tuple[str, W]]) -> None:
        """Have these loaded, by path and weights, and know of no others."""
        self._loaded.clear()
        self._known.clear()
        for name, (path, weights) in adapters.items():
            self._put(name, path, weights)

    async def load(self, name: str, source: AdapterSource) -> None:
        """Load under a name that is not taken. Waits while another adapter is unloaded."""
        async with self._one_change:
            if name in self._loaded:
                raise self._error(f"Failed to load LoRA adapter {name} because it is already loaded")
            try:
                weights = await self._read(source)
            except (OSError, ValueError, KeyError) as error:
                raise self._error(f"Failed to load LoRA adapter {name}: {error}") from error
            self._put(name, source if isinstance(source, str) else _IN_BODY, weights)

    async def unload(self, name: str) -> None:
        """Forget it at once for new requests; returns when the last request that uses it has ended."""
        async with self._one_change:
            adapter = self._loaded.pop(name, None)
            if adapter is None:
                raise adapter_error(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self._loaded)}", None)
            await self._unused.wait_until(lambda: adapter.users == 0)

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncGenerator[LoadedAdapter[W] | None, None]:
        """The adapter that a request names, loaded again if need be; an unload waits for the end of the block."""
        if name is None:
            yield None
            return
        adapter = await self._named(name)
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1
            self._unused.notify()

    async def _named(self, name: str) -> LoadedAdapter[W]:
        if name not in self._known:
            loaded = list(self._loaded)
            raise bad_value(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {loaded}.")
        if name not in self._loaded:
            async with self._one_change:
                if name not in self._loaded:
                    try:
                        weights = await self._read(self._known[name])
                    except (OSError, ValueError, KeyError) as error:
                        raise bad_value(f"Failed to implicitly load LoRA adapter {name}: {error}") from error
                    self._put(name, self._known[name], weights)
        return self._loaded[name]

    def _put(self, name: str, path: str, weights: W) -> None:
        self._loaded[name] = LoadedAdapter(weights=weights, path=path, uid=next(self._uids))
        self._known[name] = path

    def _error(self, message: str) -> WireError:
        return adapter_error(message, self.paths)
