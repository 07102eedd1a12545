"""Servers that accept and never answer: every wait is finite, and slow ones are waited for."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import SamplingError, ServerUnavailable
from asyncrl.events import Notice, RequestRepeated
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.clock import run_virtual
from asyncrl.testing.server import Fault, ScriptedServer, network
from asyncrl.types import StopReason
from tests.sampling.clients import CONTROL_CALLS, OTHER, URL, key_of, make_request, open_client, scripted, watch

pytestmark = pytest.mark.virtual_clock
HOUR_S = 3600.0

_NEVER = {
    "held": Fault(hold=True),
    "dripping": Fault(drip=True),
}


async def _warm(sampler: SGLang, *, tokens: int = 4) -> None:
    """Some answers, so that the servers' pace is known."""
    for key in range(8):
        await sampler.sample(make_request(f"warm{key}", max_new_tokens=tokens))


@pytest.mark.parametrize("tokens", [1, 4, 64])
@pytest.mark.parametrize("way", sorted(_NEVER))
@pytest.mark.parametrize("known", [True, False])
async def test_a_request_that_is_never_answered_is_asked_elsewhere(way: str, known: bool, tokens: int) -> None:
    """Aborted where it hangs, told with numbers, counted, and gone on with from what is there."""
    servers = {URL: scripted(seconds=lambda call: 1.0), OTHER: scripted(seconds=lambda call: 1.0)}
    async with open_client(servers) as sampler:
        notices: list[Notice] = []
        repeats: list[RequestRepeated] = []
        sampler.events.subscribe(notices.append, kinds=(Notice,))  # type: ignore[arg-type]
        sampler.events.subscribe(repeats.append, kinds=(RequestRepeated,))  # type: ignore[arg-type]
        if known:
            await _warm(sampler)
        began = anyio.current_time()
        servers[URL].fault("/generate", _NEVER[way])
        request = make_request(key_of(URL, URL, OTHER), max_new_tokens=tokens)
        segment = await sampler.sample(request)
        if segment.stop is StopReason.ABORT:
            assert 0 < len(segment.tokens) < tokens
            segment = await sampler.sample(request)
        assert segment.server == OTHER
        assert anyio.current_time() - began < (20 * 60 if known else HOUR_S)
        held = next(call for call in servers[URL].generated if call.sampling_params["max_new_tokens"] == tokens)
        assert held.rid in servers[URL].aborted or known
        (notice,) = [notice for notice in notices if notice.name == "requests_overdue"]
        assert notice.keys["url"] == URL
        assert notice.keys["seconds"] >= notice.keys["allowed_seconds"] > 0  # type: ignore[operator]
        assert [(repeat.cause) for repeat in repeats] == ["late"]


async def test_a_server_that_does_it_again_is_quarantined_and_comes_back() -> None:
    """The first time it is looked at; the next time all that it has moves, and it is restored like any other."""
    servers = {URL: scripted(seconds=lambda call: 1.0), OTHER: scripted(seconds=lambda call: 1.0)}
    restored: list[str] = []

    async def restore(server: ServerControl) -> None:
        restored.append(server.url)

    async with open_client(servers) as sampler:
        await _warm(sampler)
        sampler.claim(None, restore)
        names = watch(sampler)
        key = key_of(URL, URL, OTHER)
        for _ in range(2):
            servers[URL].fault("/generate", Fault(hold=True))
            assert (await sampler.sample(make_request(key, max_new_tokens=1))).server == OTHER
        await anyio.sleep(60)
        assert restored == [URL, URL]
        assert names == [
            "requests_overdue",
            "server_returned",
            "requests_overdue",
            "server_quarantined",
            "server_returned",
        ]
        assert (await sampler.sample(make_request(key))).server == URL


@pytest.mark.parametrize("way", sorted(_NEVER))
async def test_with_one_server_it_is_asked_again_there(way: str) -> None:
    """Once it was looked at."""
    one = scripted(seconds=lambda call: 1.0)
    async with open_client({URL: one}) as sampler:
        await _warm(sampler)
        one.fault("/generate", _NEVER[way])
        segment = await sampler.sample(make_request("t", max_new_tokens=1))
        assert segment.server == URL
        assert anyio.current_time() < HOUR_S


async def test_a_server_that_never_answers_anything_ends_in_an_error() -> None:
    """A single server that hangs for good is an outage, and not a silent wait."""
    one = scripted(seconds=lambda call: 1.0)
    async with open_client({URL: one}) as sampler:
        await _warm(sampler)
        for route in ("/generate", "/abort_request", "/v1/loads", "/model_info", "/server_info"):
            one.fault(route, *[Fault(hold=True)] * 1000)
        with pytest.raises(ServerUnavailable):
            await sampler.sample(make_request("t"))
        assert anyio.current_time() < HOUR_S


@pytest.mark.parametrize("way", sorted(_NEVER))
async def test_behind_a_router_it_is_asked_again_with_another_key(way: str) -> None:
    """Nobody knows which server hangs: it is aborted on all of them, and the router takes it elsewhere."""
    router, one, two = (scripted(seconds=lambda call: 1.0) for _ in range(3))
    servers = {"http://router": router, URL: one, OTHER: two}
    async with SGLang([URL, OTHER], transport=network(servers), router="http://router").opened() as sampler:
        await _warm(sampler)
        names = watch(sampler)
        router.fault("/generate", _NEVER[way])
        segment = await sampler.sample(make_request("t"))
        assert len(segment.tokens) == 4
        assert anyio.current_time() < HOUR_S
        rid = router.generated[8].rid
        assert rid in one.aborted and rid in two.aborted
        assert names == ["requests_overdue"]


@pytest.mark.slow
@pytest.mark.parametrize("slower", [2, 30, 1000])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tokens", [4, 48])
async def test_a_slow_server_is_waited_for(slower: float, first: bool, tokens: int) -> None:
    """Also if it is a thousand times slower than the other one, and also its first request ever."""
    pace_s = 0.03
    servers = {
        URL: scripted(seconds=lambda call: slower * pace_s * call.sampling_params["max_new_tokens"]),
        OTHER: scripted(seconds=lambda call: pace_s * call.sampling_params["max_new_tokens"]),
    }
    async with open_client(servers) as sampler:
        names = watch(sampler)
        key = key_of(URL, URL, OTHER)
        if not first:
            await _warm(sampler)
        assert (await sampler.sample(make_request(key, max_new_tokens=tokens))).server == URL
        assert names == []


@pytest.mark.slow
async def test_a_generation_of_30_000_tokens_is_waited_for() -> None:
    """After short ones, and beside them."""
    one = scripted(seconds=lambda call: 0.04 * call.sampling_params["max_new_tokens"])
    async with open_client({URL: one}) as sampler, anyio.create_task_group() as tasks:
        names = watch(sampler)
        await _warm(sampler)

        async def others() -> None:
            while True:
                await sampler.sample(make_request("short"))
                await anyio.sleep(20)

        tasks.start_soon(others)
        assert len((await sampler.sample(make_request("long", max_new_tokens=30_000))).tokens) == 30_000
        assert names == []
        tasks.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("paused_s", [600.0, 1800.0])
async def test_a_pause_does_not_count(mode: Any, paused_s: float) -> None:
    """Requests that wait for a publication are not late, however long it takes."""
    one = scripted(seconds=lambda call: 1.0)
    async with open_client({URL: one}) as sampler:
        names = watch(sampler)
        await _warm(sampler)
        async with anyio.create_task_group() as tasks:
            await sampler.live[0].pause(mode)
            tasks.start_soon(sampler.sample, make_request("t"))
            await anyio.sleep(paused_s)
            await sampler.live[0].continue_()
        assert names == []
        assert anyio.current_time() < paused_s + 60


@pytest.mark.slow
async def test_after_a_pause_the_clock_runs_again() -> None:
    """What hangs after it is found as soon as without it."""
    one = scripted(seconds=lambda call: 1.0)
    async with open_client({URL: one}) as sampler:
        await _warm(sampler)
        one.fault("/generate", Fault(hold=True))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sampler.sample, make_request("t", max_new_tokens=1))
            await anyio.sleep(10)
            await sampler.live[0].pause("retract")
            await anyio.sleep(1200)
            await sampler.live[0].continue_()
            resumed = anyio.current_time()
        assert 100 < anyio.current_time() - resumed < 600


async def test_a_removed_server_that_hangs_holds_nothing() -> None:
    """It gets nothing new, and what it never answers moves."""
    servers = {URL: scripted(seconds=lambda call: 1.0), OTHER: scripted(seconds=lambda call: 1.0)}
    async with open_client(servers) as sampler, anyio.create_task_group() as tasks:
        await _warm(sampler)
        servers[URL].fault("/generate", Fault(drip=True))
        tasks.start_soon(sampler.sample, make_request(key_of(URL, URL, OTHER)))
        await anyio.sleep(1)
        sampler.remove(URL)
    assert len(servers[OTHER].generated) >= 1


@pytest.mark.parametrize("way", sorted(_NEVER))
@pytest.mark.parametrize("name", sorted(CONTROL_CALLS))
async def test_every_control_call_ends(name: str, way: str, threads_in_place: None) -> None:
    """By itself, without a deadline of its caller, and with an error that says where it hung."""
    one = scripted()
    route, call = CONTROL_CALLS[name]
    async with open_client({URL: one}) as sampler:
        one.fault(route, *[_NEVER[way]] * 3)
        with pytest.raises(SamplingError, match=route):
            await call(sampler.live[0])
        assert 0 < anyio.current_time() <= 3 * 300


@pytest.mark.parametrize("way", sorted(_NEVER))
async def test_an_abort_that_hangs_is_given_up(way: str) -> None:
    """It says that nobody took it."""
    one = scripted()
    async with open_client({URL: one}) as sampler:
        one.fault("/abort_request", _NEVER[way])
        assert not await sampler.live[0].abort("r")
        assert anyio.current_time() == 5
        assert await sampler.live[0].abort("r")


@pytest.mark.slow
@settings(max_examples=15, derandomize=True, deadline=None)
@given(
    st.lists(st.sampled_from(["", "", "hold", "drip", "lose", "500"]), min_size=1, max_size=12),
    st.lists(st.sampled_from(["", "", "hold", "drip", "ignore"]), max_size=12),
    st.lists(st.sampled_from(["", "hold", "404", "drip"]), max_size=12),
    st.integers(1, 3),
    st.integers(0, 2**16),
)
def test_whatever_hangs_every_request_ends(
    generate: list[str], aborts: list[str], loads: list[str], count: int, seed: int
) -> None:
    """Requests, aborts and reports of load hang in any mixture: nobody waits for ever, and nothing is left."""
    faults = {
        "": Fault(),
        "hold": Fault(hold=True),
        "drip": Fault(drip=True),
        "lose": Fault(lose=True),
        "ignore": Fault(ignore=True),
        "500": Fault(status=500),
        "404": Fault(status=404),
    }

    async def main() -> None:
        urls = [f"http://s{number}" for number in range(count)]
        servers: dict[str, ScriptedServer] = {url: scripted(seconds=lambda call: 2.0) for url in urls}
        for server in servers.values():
            server.fault("/generate", *(faults[name] for name in generate))
            server.fault("/abort_request", *(faults[name] for name in aborts))
            server.fault("/v1/loads", *(faults[name] for name in loads))
        async with open_client(servers, seed=seed) as sampler:
            ended = 0

            async def ask(key: int) -> None:
                nonlocal ended
                with suppress(SamplingError):
                    await sampler.sample(make_request(str(key)))
                ended += 1

            with anyio.fail_after(7 * 24 * HOUR_S):
                async with anyio.create_task_group() as tasks:
                    for key in range(6):
                        tasks.start_soon(ask, key)
            assert ended == 6
            assert math.isfinite(anyio.current_time())

    run_virtual(main, seed=seed)
