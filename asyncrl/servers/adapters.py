"""The adapters that a server of ours has in memory, by SGLang's rules: who uses them, and which it could load again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import anyio

from asyncrl.concurrency.notifier import Notifier
from asyncrl.servers.wireserver import WireError, adapter_error, bad_value

__all__ = ["Adapters", "LoadedAdapter"]

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedAdapter(Generic[T]):
    """An adapter in memory. ``uid`` tells apart two loads under one name, so that they never share KV."""

    weights: T
    path: str
    uid: int
    users: int = 0
    """Requests that have it; see ``Adapters.end_use``."""


class Adapters(Generic[T]):
    """``read(name, path)`` gives the weights in a folder, or raises ``OSError``, ``ValueError`` or ``KeyError``."""

    def __init__(self, read: Callable[[str, Path], Awaitable[T]]) -> None:
        self._read = read
        self._loaded: dict[str, LoadedAdapter[T]] = {}
        self._known: dict[str, str] = {}
        # Every adapter ever loaded: a request that names an unloaded one loads it again.
        self._one_change = anyio.Lock()
        # Also while an unload waits for the requests that use the adapter.
        self._use_ended = Notifier()
        self._loads = 0
        self.reloaded: list[str] = []
        """Names that came back because a late request had them."""

    def paths(self) -> dict[str, str]:
        """Name -> path of what is loaded; that of weights which came in a request is no folder."""
        return {name: adapter.path for name, adapter in self._loaded.items()}

    async def load(self, name: str, path: str, weights: T | None = None) -> None:
        """Load a folder, or ``weights``, under a name that is not taken; waits while another one is unloaded."""
        async with self._one_change:
            if name in self._loaded:
                raise self.refusal(name, "because it is already loaded")
            try:
                self.put(name, path, await self._read(name, Path(path)) if weights is None else weights)
            except (OSError, ValueError, KeyError) as error:
                raise self.refusal(name, f"from {path}: {error}") from error

    def put(self, name: str, path: str, weights: T) -> None:
        """Have these weights under ``name``."""
        self._loads += 1
        self._loaded[name] = LoadedAdapter(weights=weights, path=path, uid=self._loads)
        self._known[name] = path

    async def unload(self, name: str) -> None:
        """Gone at once for new requests; returns when the last one that uses it has ended."""
        async with self._one_change:
            adapter = self._loaded.pop(name, None)
            if adapter is None:
                raise adapter_error(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self._loaded)}", None)
            await self._use_ended.wait_until(lambda: adapter.users == 0)

    async def named(self, name: str) -> LoadedAdapter[T]:
        """What a request names, loaded again from where it was if need be."""
        if name not in self._known:
            loaded = list(self._loaded)
            raise bad_value(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {loaded}.")
        if name not in self._loaded:
            async with self._one_change:
                if name not in self._loaded:
                    path = self._known[name]
                    try:
                        self.put(name, path, await self._read(name, Path(path)))
                    except (OSError, ValueError, KeyError) as error:
                        why = f"Failed to implicitly load LoRA adapter {name} from {path}: {error}"
                        raise bad_value(why) from error
                    self.reloaded.append(name)
        return self._loaded[name]

    def end_use(self, adapter: LoadedAdapter[T]) -> None:
        """A request that raised ``users`` has ended."""
        adapter.users -= 1
        self._use_ended.notify()

    def clear(self, *, known: bool = False) -> None:
        """Forget what is loaded, and where it was if ``known``."""
        self._loaded.clear()
        if known:
            self._known.clear()

    def refusal(self, name: str, why: str) -> WireError:
        """Says that ``name`` is not loaded."""
        return adapter_error(f"Failed to load LoRA adapter {name} {why}", self.paths())
