"""What a server says about itself before it gets requests: its software version, and how long a context it has."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.replies import context_of, shown
from asyncrl.sampling.sources import KNOWN_VERSIONS

__all__ = ["Served", "ask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One server's facts."""

    version: str
    context_tokens: int | None
    """Most tokens of prompt and output together that it takes without shortening or refusing; None: it does not say."""
    label: str
    """Of the base weights that it holds."""


async def ask(server: ServerControl, *, allow_version: bool) -> Served:
    """Ask ``server``. Raises ``SamplingError`` if it does not answer, ``ConfigError`` for a version not known to work.

    ``allow_version``: take any version.
    """
    label = await server.weight_label()
    info = await server.server_info()
    told = info.get("version")
    version = told if isinstance(told, str) else shown(told)
    if version not in KNOWN_VERSIONS and not allow_version:
        raise ConfigError(
            f"the server at {server.url} is of version {version!r}; known to work are {', '.join(KNOWN_VERSIONS)}: "
            "use one of these, or SGLang(.., allow_version=True) if you have checked yours"
        )
    try:
        return Served(version=version, context_tokens=context_of(info), label=label)
    except ProtocolError as error:
        raise ProtocolError(f"{server.url}/server_info: {error}") from error
