"""Where the URLs of sampling servers come from: a list, a file, a DNS name, or servers that the source starts itself.

A source says which servers there are. Whether one of them takes requests is the client's business: a server that a
source adds gets none before it was brought to the current policy.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NoReturn, Protocol, TypeAlias, runtime_checkable
from urllib.parse import urlsplit

import anyio
import anyio.abc
import anyio.to_thread

from asyncrl.errors import ConfigError

__all__ = [
    "KNOWN_VERSIONS",
    "Changed",
    "ChangingSource",
    "DnsSource",
    "FileSource",
    "FixedSource",
    "ServerSource",
    "check_urls",
    "source_of",
]

Changed: TypeAlias = Callable[[Sequence[str] | Exception], Awaitable[None]]
"""Told the URLs after each look, or why a look failed; what was known then stays."""

KNOWN_VERSIONS = ("0.5.23", "embedded-0.1", "scripted")
"""What servers that are known to work say about their version: SGLang's, our own, and the fake for tests."""

_LOOK_S = 10.0
_LONGEST_LOOK_S = 30.0
# Neither a file on a network file system nor a name server can wake us, so they are looked at again this often.


class ServerSource(Protocol):
    """Says which servers there are. Real: ``FixedSource``, ``FileSource``, ``DnsSource``, servers of our own."""

    @property
    def servers(self) -> int | None:
        """How many there will be; None if that is seen when it is opened."""
        ...

    @property
    def starts_servers(self) -> bool:
        """True if opening it starts them, which takes as long as they take to load a model."""
        ...

    def opened(self) -> AbstractAsyncContextManager[Sequence[str]]:
        """The URLs of servers that are up, one or more; a source that starts servers ends them at the exit.

        Raises ``ConfigError`` if there is none.
        """
        ...


@runtime_checkable
class ChangingSource(ServerSource, Protocol):
    """A source whose servers may come and go while it is open."""

    async def watch(self, changed: Changed) -> NoReturn:
        """Tell ``changed`` which servers there are, again and again, until it is cancelled."""
        ...


class FixedSource:
    """The servers of a list."""

    starts_servers = False

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = check_urls(urls)

    @property
    def servers(self) -> int:
        """How many are in the list."""
        return len(self.urls)

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Sequence[str], None]:
        """The list."""
        yield self.urls


class _LookedAt:
    """A source that has to be looked at, every ``every_s`` seconds."""

    servers: int | None = None
    starts_servers = False

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        if not every_s > 0:
            raise ConfigError.for_value("every_s", every_s, "more than 0 seconds")
        # One look at a time; its own limiter, so that a hanging file system or resolver takes no thread of others.
        self._limiter: anyio.CapacityLimiter | None = None

    def look(self) -> tuple[str, ...]:
        """The URLs as they are now; blocks. Raises ``ConfigError`` or ``OSError``."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Sequence[str], None]:
        """The URLs of the first look. Raises ``ConfigError`` if there are none, or the look fails."""
        try:
            urls = await self._look()
        except OSError as error:
            raise ConfigError(f"no servers from {self}: {error}") from error
        yield urls

    async def watch(self, changed: Changed) -> NoReturn:
        """Look again and again; see ``ChangingSource``."""
        while True:
            await anyio.sleep(self._every_s)
            try:
                found: Sequence[str] | Exception = await self._look()
            except (OSError, ConfigError) as error:
                found = error
            await changed(found)

    async def _look(self) -> tuple[str, ...]:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(1)
        # A look that hangs keeps its thread, so that the next ones wait for it and fail in the same way.
        try:
            with anyio.fail_after(_LONGEST_LOOK_S):
                return await anyio.to_thread.run_sync(self.look, limiter=self._limiter, abandon_on_cancel=True)
        except TimeoutError as error:
            raise OSError(f"{self} was not read within {_LONGEST_LOOK_S:g} s") from error


class FileSource(_LookedAt):
    """The servers of a text file, one URL in a line; what follows a ``#`` is a comment. It may change at any time.

    ``every_s``: seconds between two looks at it. Write it to another name and rename it, so that no look sees half.
    """

    def __init__(self, path: Path | str, *, every_s: float = _LOOK_S) -> None:
        super().__init__(every_s)
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def look(self) -> tuple[str, ...]:
        """The URLs in the file."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path} is no text in UTF-8: {error}") from error
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return check_urls([line for line in lines if line], key=str(self.path))


class DnsSource(_LookedAt):
    """All addresses of one name, for example of a headless service: ``DnsSource("dns+http://sglang:30000")``.

    ``every_s``: seconds between two look-ups.
    """

    def __init__(self, url: str, *, every_s: float = _LOOK_S) -> None:
        super().__init__(every_s)
        parts = urlsplit(url)
        right = parts.scheme in ("dns+http", "dns+https") and _is_server(url.removeprefix("dns+"))
        if not right or not parts.hostname or not parts.port or parts.path:
            raise ConfigError.for_value("sampler.urls", url, "dns+http://name:port or dns+https://name:port")
        self._scheme = parts.scheme.removeprefix("dns+")
        self._name, self._port = parts.hostname, parts.port

    def __str__(self) -> str:
        return f"dns+{self._scheme}://{self._name}:{self._port}"

    def look(self) -> tuple[str, ...]:
        """A URL for each address of the name, in a fixed order."""
        try:
            found = socket.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except UnicodeError as error:  # a label that is empty or too long
            raise ConfigError(f"{self} is no name that can be looked up: {error}") from error
        hosts = sorted(
            {f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0]) for family, *_, address in found}
        )
        return check_urls([f"{self._scheme}://{host}:{self._port}" for host in hosts], key=str(self))


def source_of(urls: Sequence[str] | ServerSource) -> ServerSource:
    """The source that is meant: itself, a list of URLs, or a list with one ``dns+http://name:port``."""
    if not isinstance(urls, Sequence):
        return urls
    if not isinstance(urls, str) and len(urls) == 1 and str(urls[0]).startswith("dns+"):
        return DnsSource(urls[0])
    return FixedSource(urls)


def check_urls(urls: Sequence[str], *, key: str = "sampler.urls") -> tuple[str, ...]:
    """The URLs without trailing slashes. Raises ``ConfigError`` that names ``key``."""
    if isinstance(urls, str) or not urls:
        raise ConfigError.for_value(key, urls, "a list of one or more server URLs")
    for url in urls:
        if not _is_server(url):
            raise ConfigError.for_value(key, url, "a URL of a server, such as http://host:30000 or https://host")
    clean = tuple(url.rstrip("/") for url in urls)
    if len(set(clean)) != len(clean):
        raise ConfigError.for_value(key, list(urls), "URLs that are all different")
    return clean


def _is_server(url: object) -> bool:
    if not isinstance(url, str) or any(character.isspace() or not character.isprintable() for character in url):
        return False
    try:
        parts = urlsplit(url)
        known_port = parts.port is None or parts.port > 0
    except ValueError:  # the port, or an address in brackets
        return False
    return (
        parts.scheme in ("http", "https") and bool(parts.hostname) and known_port and not parts.query + parts.fragment
    )
