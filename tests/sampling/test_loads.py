"""How many requests a server should have: the rule, and the monitor that follows it."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ProtocolError
from asyncrl.events import Notice
from asyncrl.sampling.loads import LoadMonitor, adapt
from asyncrl.sampling.pool import UNLIMITED, Pool
from asyncrl.sampling.replies import Load, parse_load
from asyncrl.testing.server import Fault, ScriptedLimits
from tests.sampling.clients import OTHER, URL, make_request, open_client, pool_of, scripted

LOADS = st.builds(
    Load, running=st.integers(0, 500), waiting=st.integers(0, 5000), kv_usage=st.none() | st.floats(0.0, 1.0)
)


def test_the_worked_example() -> None:
    """What the docstring says."""
    assert adapt(1_000_000, 100, Load(running=64, waiting=36)) == 80
    assert adapt(80, 80, Load(running=80, waiting=0)) == 96


@given(st.integers(4, UNLIMITED), st.integers(0, 5000), st.none() | LOADS)
def test_a_limit_never_falls_below_the_least_and_never_more_than_halves_what_is_ours(
    limit: int, ours: int, load: Load | None
) -> None:
    """Whatever a server says, it keeps some requests, and one look is no catastrophe."""
    after = adapt(limit, ours, load)
    assert after >= min(limit, max(4, ours // 2))
    assert after <= min(limit + 16, UNLIMITED)


@given(st.integers(4, 1000), st.integers(0, 1000), LOADS)
def test_a_limit_grows_only_if_nothing_waits(limit: int, ours: int, load: Load) -> None:
    """More requests for a server that already queues would only grow old there."""
    if adapt(limit, ours, load) > limit:
        assert load.waiting == 0
        assert ours >= 0.9 * limit


def test_full_memory_and_lateness_cut() -> None:
    """A server about to retract requests, or too busy to say, gets fewer; one with room keeps its limit."""
    assert adapt(100, 80, Load(running=80, waiting=0, kv_usage=0.97)) == 70
    assert adapt(100, 80, None) == 60
    assert adapt(100, 80, Load(running=60, waiting=10, kv_usage=0.5)) == 100
    assert adapt(80, 80, Load(running=80, waiting=0, kv_usage=0.9)) == 80


def test_a_queue_before_a_server_with_room_is_no_overload() -> None:
    """After a pause everything is prefilled anew: cutting then would idle the server after each publication."""
    assert adapt(100, 80, Load(running=0, waiting=80)) == 100
    assert adapt(100, 80, Load(running=20, waiting=60, kv_usage=0.2, most_running=64)) == 100
    assert adapt(100, 80, Load(running=60, waiting=20, kv_usage=0.2, most_running=64)) == 75
    assert adapt(100, 80, Load(running=20, waiting=60, kv_usage=0.9, most_running=64)) == 40
    assert adapt(100, 80, Load(running=20, waiting=60)) == 40


@given(st.integers(10, 200), st.integers(1, 600))
def test_limits_settle_where_the_server_runs_full(most: int, offered: int) -> None:
    """A server that runs ``most`` at once ends with those and a short queue, from any offer."""
    limit = UNLIMITED
    for _ in range(200):
        ours = min(limit, offered)
        limit = adapt(limit, ours, Load(running=min(ours, most), waiting=max(0, ours - most)))
    ours = min(limit, offered)
    assert min(offered, most) <= ours <= most + max(8, most // 4) + 16


def test_loads_of_all_ranks_add_up() -> None:
    """Ranks share the requests, and the fullest memory counts."""
    ranks = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.2},
        {"num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.7, "max_running_requests": 64},
    ]
    assert parse_load({"loads": ranks}) == Load(running=7, waiting=1, kv_usage=0.7, most_running=64)
    assert parse_load({"loads": ranks[:1]}).most_running is None
    with pytest.raises(ProtocolError, match="num_waiting_reqs"):
        parse_load({"loads": [{"num_running_reqs": 3}]})


@pytest.mark.virtual_clock
async def test_what_a_server_queues_lowers_the_capacity_until_it_runs_dry() -> None:
    """Capacity comes down to what runs and a short queue, and goes up again when nothing waits."""
    one = scripted(seconds=lambda call: 600.0, limits=ScriptedLimits(max_running_requests=10))
    seen: list[int] = []
    async with open_client({URL: one}) as sampler:
        forget = sampler.on_capacity(seen.append)
        async with anyio.create_task_group() as tasks:
            for key in range(40):
                tasks.start_soon(sampler.sample, make_request(str(key)))
            await anyio.sleep(30)
            assert seen[0] == UNLIMITED
            assert seen[-1] == 20  # half of the forty, for one look at most halves
            tasks.cancel_scope.cancel()
        forget()
        known = len(seen)
        async with anyio.create_task_group() as tasks:
            for key in range(20):
                tasks.start_soon(sampler.sample, make_request(str(key)))
            await anyio.sleep(30)
            tasks.cancel_scope.cancel()
        assert len(seen) == known


@pytest.mark.virtual_clock
@pytest.mark.parametrize("fault", [Fault(status=404), Fault(edit=lambda reply: reply.clear())])
async def test_a_server_that_cannot_tell_its_load_keeps_its_limit_and_is_told_once(fault: Fault) -> None:
    """Other software, or another version, is no reason to send less."""
    one = scripted(seconds=lambda call: 30.0)
    one.fault("/v1/loads", *[fault] * 100)
    names: list[str] = []
    async with open_client({URL: one}) as sampler:
        sampler.events.subscribe(lambda event: names.append(event.name) if isinstance(event, Notice) else None)
        await sampler.sample(make_request("t"))
        capacities: list[int] = []
        sampler.on_capacity(capacities.append)
    assert names == ["server_load_unknown"]
    assert capacities == [UNLIMITED]


@pytest.mark.virtual_clock
async def test_a_server_that_is_late_with_its_load_gets_fewer_requests() -> None:
    """Whatever keeps it from answering keeps it from sampling too."""
    one = scripted(seconds=lambda call: 20.0)
    one.fault("/v1/loads", *[Fault(hold=True)] * 100)
    async with open_client({URL: one}) as sampler, anyio.create_task_group() as tasks:
        for key in range(16):
            tasks.start_soon(sampler.sample, make_request(str(key)))
        await anyio.sleep(8)
        assert pool_of(sampler).limit(URL) == 12


async def test_a_server_that_was_removed_is_not_asked() -> None:
    """Looks start one after the other, and a server may go in between."""

    def notice(name: str, *, level: str = "warning", **keys: object) -> None:
        pytest.fail(name)

    await LoadMonitor(Pool([URL]), lambda url: None, notice).look(URL)


@pytest.mark.virtual_clock
async def test_a_server_may_be_removed_while_it_is_asked() -> None:
    """The look ends without a word."""
    one, two = scripted(seconds=lambda call: 20.0), scripted(seconds=lambda call: 20.0)
    for server in (one, two):
        server.fault("/v1/loads", Fault(hold=True))
    async with open_client({URL: one, OTHER: two}) as sampler, anyio.create_task_group() as tasks:
        for key in range(16):
            tasks.start_soon(sampler.sample, make_request(str(key)))
        await anyio.sleep(3)
        sampler.remove(URL, now=True)
        await anyio.sleep(10)
        assert sampler.urls == [OTHER]


@pytest.mark.virtual_clock
async def test_an_idle_client_asks_nobody() -> None:
    """Without requests there is nothing to adapt, and a server is left alone."""
    one = scripted()
    async with open_client({URL: one}) as sampler:
        await sampler.sample(make_request("t"))
        await anyio.sleep(86_400)
    assert sum(route == "/v1/loads" for route, _ in one.calls) <= 1


@pytest.mark.virtual_clock
async def test_the_monitor_ends_with_the_client_while_it_waits_for_an_answer() -> None:
    """Closing the client is not held up by a server that does not answer."""
    one = scripted(seconds=lambda call: 600.0)
    one.fault("/v1/loads", *[Fault(hold=True)] * 10)
    async with open_client({URL: one}) as sampler:
        with anyio.move_on_after(4):
            await sampler.sample(make_request("t"))
    assert anyio.current_time() == 4
