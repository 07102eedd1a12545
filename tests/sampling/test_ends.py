"""In which order a request ends: aborted first, by its id; then its connection is cut, or it has answered by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import httpx
import pytest

from asyncrl.errors import ConfigError, SamplingError
from asyncrl.events import Event, RequestRepeated
from asyncrl.observe.metrics import COUNTED, MetricsRecorder
from asyncrl.sampling.pool import ServerState
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.server import Fault, ScriptedServer, network
from tests.sampling.clients import OTHER, URL, key_of, make_request, open_client, pool_of, scripted, watch

pytestmark = pytest.mark.virtual_clock


class _Wire(httpx.AsyncBaseTransport):
    """Notes when calls come and how they end, in order."""

    def __init__(self, servers: dict[str, ScriptedServer]) -> None:
        self._network = network(servers)
        self.seen: list[tuple[str, str]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        route, host = request.url.path, request.url.host
        if route not in ("/generate", "/abort_request"):
            return await self._network.handle_async_request(request)
        self.seen.append((host, route))
        try:
            response = await self._network.handle_async_request(request)
        except httpx.TransportError:
            self.seen.append((host, f"{route} broke"))
            raise
        except BaseException:
            self.seen.append((host, f"{route} cut"))
            raise
        self.seen.append((host, f"{route} answered"))
        return response


async def _cancel(sampler: SGLang) -> None:
    with anyio.move_on_after(1):
        await sampler.sample(make_request(key_of(URL, URL, OTHER)))


async def _quarantine(sampler: SGLang) -> None:
    await _taken_away(sampler, lambda: sampler.quarantine(URL, "test"))


async def _remove(sampler: SGLang) -> None:
    await _taken_away(sampler, lambda: sampler.remove(URL, now=True))


async def _taken_away(sampler: SGLang, take: Callable[[], None]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.sample, make_request(key_of(URL, URL, OTHER)))
        await anyio.sleep(1)
        take()


_ENDS = [_cancel, _quarantine, _remove]


@pytest.mark.parametrize("end", _ENDS)
async def test_a_server_hears_of_the_abort_before_anything_is_cut(end: Callable[[SGLang], Any]) -> None:
    """It answers with what it has, and its connection is as good as new; servers that dislike disconnects see none."""
    servers = {URL: scripted(seconds=lambda call: 1000.0), OTHER: scripted()}
    wire = _Wire(servers)
    async with SGLang(list(servers), transport=wire).opened() as sampler:
        await end(sampler)
        assert [what for host, what in wire.seen if host == "one"] == [
            "/generate",
            "/abort_request",
            "/generate answered",
            "/abort_request answered",
        ] or [what for host, what in wire.seen if host == "one"] == [
            "/generate",
            "/abort_request",
            "/abort_request answered",
            "/generate answered",
        ]


@pytest.mark.parametrize("end", _ENDS)
@pytest.mark.parametrize(
    ("fault", "bound_s"), [(Fault(ignore=True), 1.0), (Fault(hold=True), 5.0), (Fault(status=500), 0.0)]
)
async def test_an_abort_without_effect_delays_the_end_a_little(
    end: Callable[[SGLang], Any], fault: Fault, bound_s: float
) -> None:
    """Told, waited for within a bound, and then cut."""
    servers = {URL: scripted(seconds=lambda call: 1000.0), OTHER: scripted()}
    wire = _Wire(servers)
    async with SGLang(list(servers), transport=wire).opened() as sampler:
        servers[URL].fault("/abort_request", fault)
        began = anyio.current_time()
        await end(sampler)
        # A server that came back at once is not asked at once again.
        assert 0.99 + bound_s <= anyio.current_time() - began < 1.6 + bound_s
        on_one = [what for host, what in wire.seen if host == "one"]
        assert on_one.index("/abort_request") < on_one.index("/generate cut")


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(status=500), Fault(lose=True), Fault(drop=True)])
async def test_a_retry_begins_when_the_old_request_was_aborted(fault: Fault) -> None:
    """Two of them never run beside each other."""
    servers = {URL: scripted(), OTHER: scripted()}
    wire = _Wire(servers)
    async with SGLang(list(servers), transport=wire).opened() as sampler:
        servers[URL].fault("/generate", fault)
        await sampler.sample(make_request(key_of(URL, URL, OTHER)))
    aborted, again = wire.seen.index(("one", "/abort_request answered")), wire.seen.index(("two", "/generate"))
    assert aborted < again


@pytest.mark.parametrize("fault", [Fault(hold=True), Fault(drip=True)])
async def test_a_retry_does_not_wait_long_for_an_abort_that_hangs(fault: Fault) -> None:
    """Some seconds, and it goes on elsewhere."""
    servers = {URL: scripted(), OTHER: scripted()}
    async with open_client(servers) as sampler:
        servers[URL].fault("/generate", Fault(status=503))
        servers[URL].fault("/abort_request", fault)
        segment = await sampler.sample(make_request(key_of(URL, URL, OTHER)))
        assert segment.server == OTHER
        assert anyio.current_time() < 6


class _Stale(httpx.AsyncBaseTransport):
    """Its first request of each kind meets a connection that has just been closed."""

    def __init__(self, inner: httpx.AsyncBaseTransport, meanwhile: Callable[[], None]) -> None:
        self._inner = inner
        self._meanwhile = meanwhile
        self._met = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate" and not self._met:
            self._met = True
            await anyio.sleep(0.1)
            self._meanwhile()
            raise httpx.ReadError("closed") from aiohttp.ServerDisconnectedError()
        return await self._inner.handle_async_request(request)


@pytest.mark.parametrize("meanwhile", ["nothing", "removed", "removed and added", "quarantined", "suspected"])
async def test_a_repeat_goes_only_to_a_server_that_takes_requests(meanwhile: str) -> None:
    """Whatever became of it since the first attempt."""
    servers = {URL: scripted(), OTHER: scripted()}

    def change() -> None:
        match meanwhile:
            case "removed" | "removed and added":
                sampler.remove(URL)
                if meanwhile == "removed and added":
                    sampler.add(URL)
            case "quarantined":
                sampler.quarantine(URL, "test")
            case "suspected":
                sampler.suspect(URL, "test")

    sampler = SGLang(list(servers), transport=_Stale(network(servers), change))
    async with sampler.opened():
        segment = await sampler.sample(make_request(key_of(URL, URL, OTHER)))
        assert segment.server == (URL if meanwhile == "nothing" else OTHER)


@pytest.mark.parametrize(
    ("faults", "causes"),
    [
        ([], []),
        ([Fault(status=503)], ["other_server"]),
        ([Fault(lose=True)], ["other_server"]),
        ([Fault(hold=True)], ["late"]),
        ([Fault(status=400)], []),
    ],
)
async def test_every_repeat_is_an_event_and_counts(faults: list[Fault], causes: list[str]) -> None:
    """What the servers did twice is in the metrics of the step."""
    servers = {URL: scripted(), OTHER: scripted()}
    async with open_client(servers) as sampler:
        recorder = MetricsRecorder(started=0.0)
        seen: list[Event] = []
        sampler.events.subscribe(recorder.observe, kinds=COUNTED)
        sampler.events.subscribe(seen.append, kinds=(RequestRepeated,))
        servers[URL].fault("/generate", *faults)
        try:
            await sampler.sample(make_request(key_of(URL, URL, OTHER), max_new_tokens=1))
        except SamplingError:
            assert faults == [Fault(status=400)]
        metrics = recorder.take(anyio.current_time(), {})
        assert [event.cause for event in seen if isinstance(event, RequestRepeated)] == causes
        assert metrics["sampling/repeated_requests"] == len(causes)
        assert metrics["sampling/late_requests"] == causes.count("late")


_NOT_OPEN: dict[str, Callable[[SGLang], Any]] = {
    "sample": lambda sampler: sampler.sample(make_request("t")),
    "wait_live": lambda sampler: sampler.wait_live(),
    "wait_until": lambda sampler: sampler.wait_until(lambda: True),
    "vacate": lambda sampler: sampler.vacate(URL),
    "abort_older": lambda sampler: sampler.abort_older(URL, 1),
    "add": lambda sampler: sampler.add(OTHER),
    "remove": lambda sampler: sampler.remove(URL),
    "on_capacity": lambda sampler: sampler.on_capacity(lambda capacity: None),
    "spawn": lambda sampler: sampler.spawn(anyio.sleep_forever),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", sorted(_NOT_OPEN))
async def test_what_needs_open_servers_says_so(name: str, when: str) -> None:
    """By its name, before the client is opened and after it was closed."""
    sampler = SGLang([URL, OTHER], transport=network({URL: scripted(), OTHER: scripted()}))
    if when == "after":
        async with sampler.opened():
            pass
    with pytest.raises(ConfigError, match=rf"SGLang\.{re.escape(name)} needs open servers"):
        result = _NOT_OPEN[name](sampler)
        if hasattr(result, "__await__"):
            await result


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_can_be_said_without_open_servers_is_said(when: str) -> None:
    """No attribute is missing, and nothing is made up."""
    sampler = SGLang([URL, OTHER], transport=network({URL: scripted(), OTHER: scripted()}))
    if when == "after":
        async with sampler.opened():
            sampler.remove(OTHER)
            assert sampler.urls == [URL]
    assert sampler.urls == [URL, OTHER]
    assert (sampler.live, sampler.versions, sampler.context_tokens) == ([], {}, None)
    sampler.suspect(URL, "test")
    sampler.quarantine(URL, "test")
    sampler.serving(URL, 3)
    assert sampler.versions == {}


async def test_one_client_is_open_once() -> None:
    """Its state is that of one opening; later it may be opened again."""
    sampler = SGLang([URL], transport=network({URL: scripted()}))
    async with sampler.opened():
        with pytest.raises(ConfigError, match="open already"):
            async with sampler.opened():
                pass
        await sampler.sample(make_request("t"))
    async with sampler.opened():
        await sampler.sample(make_request("t"))


@pytest.mark.parametrize("now", [False, True])
async def test_a_url_that_is_added_again_while_the_old_requests_run_is_one_server(now: bool) -> None:
    """Requests of before end in their own way, and the new ones are counted with them."""
    servers = {URL: scripted(seconds=lambda call: 10.0), OTHER: scripted(seconds=lambda call: 10.0)}
    async with open_client(servers) as sampler:
        names = watch(sampler)
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(sampler.sample, make_request(key_of(URL, URL, OTHER)))
            await anyio.sleep(1)
            sampler.remove(URL, now=now)
            sampler.add(URL)
            await anyio.sleep(2)
            assert pool_of(sampler).state(URL) is ServerState.LIVE
            tasks.start_soon(sampler.sample, make_request(key_of(URL, URL, OTHER)))
            await anyio.sleep(1)
            assert pool_of(sampler).in_flight(URL) == (1 if now else 4)
        assert names == ["server_removed", "server_added", "server_returned"]
        assert pool_of(sampler).in_flight(URL) == 0
