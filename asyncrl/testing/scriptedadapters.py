"""The adapters of a scripted server: which are loaded, who uses them, and which it could load again."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from asyncrl.concurrency.notifier import Notifier
from asyncrl.servers.wireserver import WireError, adapter_error, bad_value
from asyncrl.testing.theta import find_theta, find_theta_in

__all__ = ["LoadedTheta", "ScriptedAdapters", "decoded"]

_IN_BODY = Path("__tensor__")
# What SGLang says is the path of an adapter that came in a request.


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedTheta:
    """An adapter in memory. ``uid`` tells apart two loads under one name."""

    path: Path
    theta: float
    uid: int
    users: int = 0


class ScriptedAdapters:
    """SGLang's rules of adapters. ``changed`` is notified by whoever lowers ``users``."""

    def __init__(self) -> None:
        self.changed = Notifier()
        self.reloaded: list[str] = []
        """Names that came back because a late request had them."""
        self._loaded: dict[str, LoadedTheta] = {}
        self._known: dict[str, Path] = {}
        self._one_change = anyio.Lock()
        self._loads = 0

    @property
    def paths(self) -> dict[str, Path]:
        """The loaded adapters."""
        return {name: adapter.path for name, adapter in self._loaded.items()}

    def hold(self, paths: Mapping[str, Path]) -> None:
        """Have these adapters loaded, and no others."""
        self._loaded.clear()
        for name, path in paths.items():
            self._put(name, path, find_theta_in(path) or 0.0)

    def forget(self) -> None:
        """Be a new process."""
        self._loaded.clear()
        self._known.clear()

    async def load(self, name: str, path: Path, content: Sequence[bytes] | None = None) -> None:
        """From a folder, or from the name of a tensor in ``content``. Waits while another adapter is unloaded."""
        async with self._one_change:
            if name in self._loaded:
                raise self._error(f"Failed to load LoRA adapter {name} because it is already loaded")
            theta = find_theta_in(path) if content is None else find_theta(content)
            if theta is None:
                raise self._error(f"Failed to load LoRA adapter {name} from {path}")
            self._put(name, path if content is None else _IN_BODY, theta)

    async def unload(self, name: str) -> None:
        """Gone at once for new requests; returns when the last one that uses it has ended."""
        async with self._one_change:
            adapter = self._loaded.pop(name, None)
            if adapter is None:
                raise adapter_error(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self._loaded)}", None)
            await self.changed.wait_until(lambda: adapter.users == 0)

    async def named(self, name: str) -> LoadedTheta:
        """What a request names, loaded again from where it was if need be."""
        if name not in self._loaded and name not in self._known:
            loaded = list(self._loaded)
            raise bad_value(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {loaded}.")
        if name not in self._loaded:
            async with self._one_change:
                if name not in self._loaded:
                    theta = find_theta_in(self._known[name])
                    if theta is None:
                        raise bad_value(f"Failed to implicitly load LoRA adapter {name} from {self._known[name]}")
                    self._put(name, self._known[name], theta)
                    self.reloaded.append(name)
        return self._loaded[name]

    def _put(self, name: str, path: Path, theta: float) -> None:
        self._loads += 1
        self._loaded[name] = LoadedTheta(path=path, theta=theta, uid=self._loads)
        self._known[name] = path

    def _error(self, message: str) -> WireError:
        return adapter_error(message, {name: str(path) for name, path in self.paths.items()})


def decoded(payloads: Sequence[object]) -> list[bytes]:
    """Payloads as they come in a JSON body, out of base64."""
    return [base64.b64decode(str(payload)) for payload in payloads]
