"""Choosing servers: the pure rule, and the pool around it."""

from __future__ import annotations

from collections import Counter

import anyio
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.held import Interrupted, Told
from asyncrl.sampling.pool import Pool, ServerState, choose, rendezvous
from asyncrl.sampling.transport import Client
from asyncrl.testing.server import network

URLS = ("http://a", "http://b", "http://c")


def test_a_key_keeps_its_server_when_another_one_goes() -> None:
    """Only the keys of the server that went away move."""
    for key in map(str, range(200)):
        before = rendezvous(key, URLS)
        gone = next(url for url in URLS if url != before)
        assert rendezvous(key, [url for url in URLS if url != gone]) == before


def test_keys_spread_over_servers() -> None:
    """No server is favoured: each gets about a third."""
    counts = Counter(rendezvous(str(key), URLS) for key in range(3000))
    assert all(850 < counts[url] < 1150 for url in URLS)


@given(st.dictionaries(st.sampled_from(URLS), st.integers(0, 1000), min_size=1), st.text())
def test_the_chosen_server_is_sticky_or_the_least_loaded(in_flight: dict[str, int], key: str) -> None:
    """Whatever the load, the choice is the sticky server within its share, else the least loaded one."""
    chosen = choose(key, in_flight)
    sticky = rendezvous(key, tuple(in_flight))
    mean = sum(in_flight.values()) / len(in_flight)
    if in_flight[sticky] <= 1.25 * mean + 4:
        assert chosen == sticky
    else:
        assert in_flight[chosen] == min(in_flight.values())


def test_a_hot_server_overflows() -> None:
    """A thousand requests of one key do not pile up on one server."""
    in_flight = dict.fromkeys(URLS, 0)
    for _ in range(999):
        in_flight[choose("one trajectory", in_flight)] += 1
    assert max(in_flight.values()) < 1.3 * 333 + 10


def test_pick_avoids_a_server_only_if_there_is_another() -> None:
    """A retry goes elsewhere, and to the same server if it is the only one."""
    pool = Pool(URLS[:2])
    assert pool.pick("k", avoid=URLS[0]) == URLS[1]
    pool.set_state(URLS[1], ServerState.SUSPECT)
    assert pool.pick("k", avoid=URLS[0]) == URLS[0]


async def test_requests_are_taken_from_a_server_that_goes_out_and_left_on_a_suspect() -> None:
    """Suspicion leaves what runs alone; going out cancels it."""
    pool = Pool(URLS[:1])
    ended: list[bool] = []
    place = ServerControl(Client(network({})), URLS[0], api_key=None, admin_key=None)

    def told(tell: Told) -> None:
        tell(False)

    async def run() -> None:
        with pool.request(place, "r", trajectory="t", anchor=0, work=1.0) as running:
            try:
                await running.held.make(anyio.sleep_forever(), told)
            except Interrupted:
                ended.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        assert pool.in_flight(URLS[0]) == 1
        assert (pool.server_of("t"), pool.server_of("u")) == (URLS[0], None)
        pool.set_state(URLS[0], ServerState.SUSPECT)
        await anyio.wait_all_tasks_blocked()
        assert pool.in_flight(URLS[0]) == 1
        pool.set_state(URLS[0], ServerState.OUT)
    assert ended == [True]
    assert pool.in_flight(URLS[0]) == 0


async def test_waiting_for_a_live_server_ends_when_one_returns() -> None:
    """Whoever waits goes on at the change of state."""
    pool = Pool(URLS[:1])
    pool.set_state(URLS[0], ServerState.OUT)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.wait_live)
        await anyio.wait_all_tasks_blocked()
        pool.set_state(URLS[0], ServerState.LIVE)
    assert pool.live == [URLS[0]]
