"""What a server says about itself before it gets requests: its software version, and how long a context it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.sources import KNOWN_VERSIONS

__all__ = ["Served", "ask", "context_of"]

_RESERVED_TOKENS = 6
# The server refuses a prompt that leaves fewer than these of its context or its KV memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One server's facts."""

    version: str
    context_tokens: int | None
    """Most tokens of prompt and output together that it takes without shortening or refusing; None: it does not say."""


def context_of(info: Mapping[str, Any]) -> int | None:
    """The context in a reply of ``/server_info``.

    A server of 2,048 positions and 16,384 KV slots says ``max_req_input_len`` 2,042 or ``context_length`` 2,048: 2,042.
    """
    found = [
        int(info[key]) - reserved
        for key, reserved in (
            ("max_req_input_len", 0),
            ("context_length", _RESERVED_TOKENS),
            ("max_total_num_tokens", _RESERVED_TOKENS),
        )
        if isinstance(info.get(key), int)
    ]
    return min(found, default=None)


async def ask(server: ServerControl, *, allow_version: bool) -> Served:
    """Ask ``server``. Raises ``SamplingError`` if it does not answer, ``ConfigError`` for a version not known to work.

    ``allow_version``: take any version.
    """
    await server.model_info()
    info = await server.server_info()
    version = str(info.get("version"))
    if version not in KNOWN_VERSIONS and not allow_version:
        raise ConfigError(
            f"the server at {server.url} is of version {version!r}; known to work are {', '.join(KNOWN_VERSIONS)}: "
            "use one of these, or SGLang(.., allow_version=True) if you have checked yours"
        )
    return Served(version=version, context_tokens=context_of(info))
