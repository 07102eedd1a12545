"""Where the URLs of servers come from."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.errors import ConfigError
from asyncrl.sampling.sources import DnsSource, FileSource, FixedSource, source_of


def test_a_file_has_one_url_a_line_and_comments(tmp_path: Path) -> None:
    """What follows a # is for people."""
    file = tmp_path / "servers.txt"
    file.write_text("# the first rack\nhttp://a:1/\n\n  http://b:2  # slow\n")
    assert FileSource(file).look() == ("http://a:1", "http://b:2")


@pytest.mark.parametrize(
    ("text", "found"), [("# none\n", r"\[\]"), ("a:1\n", "a:1"), ("http://a\nhttp://a/\n", "differ")]
)
def test_a_file_with_mistakes_is_named_with_what_was_found(tmp_path: Path, text: str, found: str) -> None:
    """The error says which file, for the recipe only names it."""
    file = tmp_path / "servers.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"servers.txt is .*{found}"):
        FileSource(file).look()


async def test_a_file_is_read_again_and_failures_are_told(tmp_path: Path) -> None:
    """Each look gives what the file says then, or why it could not be read."""
    file = tmp_path / "servers.txt"
    file.write_text("http://a:1")
    source = FileSource(file, every_s=0.01)
    seen: list[Sequence[str] | Exception] = []

    async with source.opened() as urls:
        assert tuple(urls) == ("http://a:1",)

        async def changed(found: Sequence[str] | Exception) -> None:
            seen.append(found)
            if len(seen) == 1:
                file.unlink()
            elif len(seen) == 2:
                file.write_text("http://b:2")
            else:
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.watch, changed)
    assert seen[0] == ("http://a:1",)
    assert isinstance(seen[1], OSError)
    assert seen[2] == ("http://b:2",)


async def test_a_missing_file_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    """At the start nothing is known that could be kept."""
    with pytest.raises(ConfigError, match=r"no servers from .*servers\.txt"):
        async with FileSource(tmp_path / "servers.txt").opened():
            pass


def test_each_address_of_a_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both families, each once and in a fixed order."""
    addresses = [
        (socket.AF_INET, 1, 6, "", ("10.0.0.2", 30000)),
        (socket.AF_INET6, 1, 6, "", ("fd00::1", 30000, 0, 0)),
        (socket.AF_INET, 1, 6, "", ("10.0.0.1", 30000)),
        (socket.AF_INET, 1, 6, "", ("10.0.0.2", 30000)),
    ]
    asked: list[Any] = []

    def resolve(name: str, port: int, **options: Any) -> list[Any]:
        asked.append((name, port))
        return addresses

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    source = source_of(["dns+http://sglang.default.svc:30000"])
    assert isinstance(source, DnsSource)
    assert source.look() == ("http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://[fd00::1]:30000")
    assert asked == [("sglang.default.svc", 30000)]


@pytest.mark.parametrize("url", ["dns+http://name", "dns+ftp://name:1", "dns+http://:1", "dns+http://name:1/path"])
def test_names_are_checked(url: str) -> None:
    """A scheme, a name and a port, and nothing else."""
    with pytest.raises(ConfigError, match="must be dns"):
        DnsSource(url)


def test_what_is_meant_by_urls() -> None:
    """A list is a list, and a source is itself."""
    fixed = source_of(["http://a:1/"])
    assert isinstance(fixed, FixedSource)
    assert fixed.urls == ("http://a:1",)
    assert source_of(fixed) is fixed
    with pytest.raises(ConfigError, match="every_s"):
        FileSource("servers.txt", every_s=0)


_NO_SERVERS: list[Any] = [
    "",
    "a:1",
    "ftp://a",
    "http://",
    "http:///x",
    "http://a b",
    "http://a\n",
    "http://a:x",
    "http://a:99999",
    "http://a:0",
    "http://[::1",
    "http://\x00",
    "http://a?x=1",
    "http://a#f",
    7,
    None,
    b"http://a",
    ["http://a"],
]


@pytest.mark.parametrize("url", _NO_SERVERS)
def test_what_is_no_url_of_a_server_is_refused_by_name(url: Any) -> None:
    """Whatever somebody wrote into a list, before anything is sent there."""
    with pytest.raises(ConfigError, match=r"sampler\.urls is .*, but must be a URL of a server"):
        FixedSource(["http://a", url])


@pytest.mark.parametrize("url", ["http://a", "https://a.b:443/", "http://[fd00::1]:30000", "http://10.0.0.1:1/base"])
def test_urls_of_servers_are_taken(url: str) -> None:
    """With and without a port, of every kind of address."""
    assert FixedSource([url]).urls == (url.rstrip("/"),)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"http://a\xff:1", b"", b"\x00", b"http://a http://b", b"ftp://a"]
)
async def test_whatever_a_file_becomes_the_servers_stay(tmp_path: Path, content: bytes) -> None:
    """Half a write, another encoding or a typing mistake is a failed look, and never the end of a run."""
    file = tmp_path / "servers.txt"
    file.write_text("http://a:1")
    source = FileSource(file, every_s=0.001)
    seen: list[Sequence[str] | Exception] = []

    async def changed(found: Sequence[str] | Exception) -> None:
        seen.append(found)
        tasks.cancel_scope.cancel()

    async with source.opened():
        file.write_bytes(content)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.watch, changed)
    assert isinstance(seen[0], ConfigError)
    assert str(file) in str(seen[0])


@pytest.mark.virtual_clock
async def test_a_look_that_hangs_is_a_failed_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system whose server is gone: told each time, and nothing waits for it."""

    async def hang(*args: Any, **options: Any) -> Any:
        await anyio.sleep_forever()

    file = tmp_path / "servers.txt"
    file.write_text("http://a:1")
    source = FileSource(file)
    seen: list[Sequence[str] | Exception] = []

    async def changed(found: Sequence[str] | Exception) -> None:
        seen.append(found)
        if len(seen) == 2:
            tasks.cancel_scope.cancel()

    monkeypatch.setattr(anyio.to_thread, "run_sync", hang)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.watch, changed)
    assert all(isinstance(found, OSError) for found in seen)
    assert anyio.current_time() == 2 * (10 + 30)
    with pytest.raises(ConfigError, match="was not read within 30 s"):
        async with source.opened():
            pass
