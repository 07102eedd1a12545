"""Many servers: added and removed while running, dead, slow or of other versions, and behind a router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import anyio
import pytest

from asyncrl.errors import ConfigError, ProtocolError, PublicationError, RequestRefused, ServerUnavailable
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.sources import Changed
from asyncrl.testing.server import Fault, ScriptedLimits, ScriptedServer, network
from asyncrl.types import StopReason
from tests.sampling.clients import OTHER, THIRD, URL, key_of, make_request, open_client, pool_of, scripted, watch

pytestmark = pytest.mark.virtual_clock
ROUTER = "http://router:1"


async def test_an_added_server_takes_requests_only_after_it_was_brought_to_the_policy() -> None:
    """Until the publisher has restored it, it gets nothing; failures are tried again and told once."""
    one, two = scripted(), scripted()
    key = key_of(OTHER, URL, OTHER)
    ready = False

    async def restore(control: ServerControl) -> None:
        if not ready:
            raise PublicationError("not yet")

    async with open_client({URL: one, OTHER: two}, urls=[URL]) as sampler:
        sampler.claim(None, restore)
        names = watch(sampler)
        sampler.add(OTHER)
        await anyio.sleep(100)
        assert (await sampler.sample(make_request(key))).server == URL
        assert [control.url for control in sampler.live] == [URL]
        ready = True
        await anyio.sleep(60)
        assert (await sampler.sample(make_request(key))).server == OTHER
        assert names == ["server_added", "server_not_ready", "server_returned"]
        with pytest.raises(ConfigError, match="that is not in use"):
            sampler.add(OTHER + "/")


async def test_a_server_that_is_added_before_it_is_up_joins_when_it_is() -> None:
    """Who writes the list of servers need not wait for them."""
    one, two = scripted(), scripted()
    two.down = True
    async with open_client({URL: one, OTHER: two}, urls=[URL]) as sampler:
        sampler.add(OTHER)
        await anyio.sleep(300)
        assert len(sampler.live) == 1
        two.down = False
        await anyio.sleep(31)
        assert len(sampler.live) == 2


async def test_an_added_server_of_unknown_version_is_not_used() -> None:
    """It is held to what the others were when the client was opened."""
    one, two = scripted(), scripted()
    two.fault("/server_info", *[Fault(edit=lambda reply: reply.update(version="9.9"))] * 100)
    async with open_client({URL: one, OTHER: two}, urls=[URL]) as sampler:
        sampler.add(OTHER)
        await anyio.sleep(300)
        assert [control.url for control in sampler.live] == [URL]


@pytest.mark.parametrize("now", [False, True])
async def test_a_removed_server_gets_no_new_requests_and_is_forgotten(now: bool) -> None:
    """What runs there goes on, or moves if it is to leave at once; then nothing of it is left."""
    one, two = scripted(seconds=lambda call: 10.0), scripted(seconds=lambda call: 10.0)
    key = key_of(URL, URL, OTHER)
    servers: list[str] = []
    async with open_client({URL: one, OTHER: two}) as sampler:

        async def sample() -> None:
            servers.append((await sampler.sample(make_request(key))).server)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample)
            await anyio.sleep(1)
            sampler.remove(URL, now=now)
            assert [control.url for control in sampler.live] == [OTHER]
            tasks.start_soon(sample)
        assert servers == ([OTHER, OTHER] if now else [URL, OTHER])
        assert sampler.urls == [OTHER]
        assert URL not in pool_of(sampler)
        assert len(one.aborted) == now
        # What is said about it later concerns nobody.
        sampler.suspect(URL, "late")
        sampler.quarantine(URL, "late")
        await anyio.sleep(100)
        assert [control.url for control in sampler.live] == [OTHER]


async def test_the_last_server_cannot_be_removed_nor_one_that_is_not_there() -> None:
    """A run without servers has nothing to wait for."""
    async with open_client({URL: scripted()}) as sampler:
        with pytest.raises(ConfigError, match="it is the last server"):
            sampler.remove(URL)
        with pytest.raises(ConfigError, match="http://nowhere"):
            sampler.remove("http://nowhere")


async def test_a_server_that_leaves_and_comes_back_keeps_its_requests() -> None:
    """A list that flickers costs a restoration and no request."""
    one, two = scripted(seconds=lambda call: 10.0), scripted()
    async with open_client({URL: one, OTHER: two}) as sampler, anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.sample, make_request(key_of(URL, URL, OTHER)))
        await anyio.sleep(1)
        sampler.remove(URL)
        sampler.add(URL)
        await anyio.sleep(1)
        assert len(sampler.live) == 2
        assert pool_of(sampler).in_flight(URL) == 1
    assert one.aborted == []


async def test_a_server_that_is_removed_on_its_way_back_stays_away() -> None:
    """Nobody goes on asking a server that is not wanted any more."""
    one, two = scripted(), scripted()
    async with open_client({URL: one, OTHER: two}) as sampler:
        one.down = True
        sampler.quarantine(URL, "test")
        await anyio.sleep(50)
        sampler.remove(URL)
        one.down = False
        asked = len(one.calls)
        await anyio.sleep(300)
        assert len(one.calls) == asked
        assert sampler.urls == [OTHER]


async def test_a_server_that_is_removed_at_the_end_of_its_restoration_does_not_return() -> None:
    """Nothing can be interrupted there any more, and still it is not wanted."""
    async with open_client({URL: scripted(), OTHER: scripted()}) as sampler:

        async def restore(control: ServerControl) -> None:
            sampler.remove(control.url)

        sampler.claim(None, restore)
        sampler.suspect(URL, "test")
        await anyio.sleep(60)
        assert sampler.urls == [OTHER]
        assert [control.url for control in sampler.live] == [OTHER]


class _Changing:
    """A source that says what it is told to, every ten seconds."""

    servers = None
    starts_servers = False

    def __init__(self, *looks: Sequence[str] | Exception) -> None:
        self._looks = looks

    def opened(self) -> Any:
        """The first look."""
        return nullcontext(self._looks[0])

    async def watch(self, changed: Changed) -> Any:
        """The other looks."""
        for look in self._looks[1:]:
            await anyio.sleep(10)
            await changed(look)
        await anyio.sleep_forever()


async def test_servers_follow_their_source() -> None:
    """New ones join, lost ones leave, and a failed look changes nothing and is told once."""
    failure = OSError("no answer")
    source = _Changing([URL], [URL, OTHER], failure, failure, [OTHER])
    async with open_client({URL: scripted(), OTHER: scripted()}, urls=source) as sampler:
        names = watch(sampler)
        await anyio.sleep(15)
        assert sampler.urls == [URL, OTHER]
        await anyio.sleep(20)
        assert sampler.urls == [URL, OTHER]
        await anyio.sleep(10)
        assert sampler.urls == [OTHER]
    assert names == ["server_added", "server_returned", "servers_unknown", "server_removed"]


@pytest.mark.slow
async def test_a_dead_and_a_slow_server_get_little_and_sessions_stay_where_they_are() -> None:
    """Of three servers one dies and one is slow: all is answered, mostly by the third."""
    dead = scripted(seconds=lambda call: 1.0)
    slow = scripted(seconds=lambda call: 100.0, limits=ScriptedLimits(max_running_requests=4))
    well = scripted(seconds=lambda call: 1.0)
    answered: Counter[str] = Counter()
    async with open_client({URL: dead, OTHER: slow, THIRD: well}) as sampler:
        places: dict[str, list[str]] = {}

        async def talk(key: str) -> None:
            for _ in range(20):
                segment = await sampler.sample(make_request(key))
                answered[segment.server] += 1
                places.setdefault(key, []).append(segment.server)

        async def die() -> None:
            await anyio.sleep(5.5)
            dead.down = True
            sampler.quarantine(URL, "it died")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(die)
            for key in range(60):
                tasks.start_soon(talk, str(key))
            await anyio.sleep(60)
            # The slow one holds a share by number of requests, and for its queue it gets fewer new ones.
            assert pool_of(sampler).in_flight(OTHER) < 25
            assert pool_of(sampler).limit(OTHER) <= 12
            in_a_minute = Counter(answered)
    assert sum(answered.values()) == 60 * 20
    assert in_a_minute[THIRD] > 20 * in_a_minute[OTHER]
    assert answered[URL] < 200
    # Conversations move when they must and not otherwise.
    moves = [sum(a != b for a, b in pairwise(place)) for place in places.values()]
    assert sum(moves) / len(moves) < 2


async def test_capacity_follows_the_servers_that_take_requests() -> None:
    """The limits of those that are in use, and at least one request, so that an outage is noticed."""
    async with open_client({URL: scripted(), OTHER: scripted()}) as sampler:
        seen: list[int] = []
        forget = sampler.on_capacity(seen.append)
        pool_of(sampler).set_limit(URL, 10)
        pool_of(sampler).set_limit(OTHER, 7)
        assert seen[-1] == 17
        sampler.claim(None, _never)
        sampler.quarantine(URL, "test")
        assert seen[-1] == 7
        sampler.quarantine(OTHER, "test")
        assert seen[-1] == 1
        forget()
        pool_of(sampler).set_limit(OTHER, 9)
        assert seen[-1] == 1


async def test_new_requests_go_where_there_is_room() -> None:
    """A server at its limit is passed over, also by the trajectories that stick to it."""
    one, two = scripted(seconds=lambda call: 10.0), scripted(seconds=lambda call: 10.0)
    async with open_client({URL: one, OTHER: two}) as sampler, anyio.create_task_group() as tasks:
        pool_of(sampler).set_limit(URL, 1)
        for _ in range(3):
            tasks.start_soon(sampler.sample, make_request(key_of(URL, URL, OTHER)))
        await anyio.sleep(1)
        assert (one.in_flight, two.in_flight) == (1, 2)


async def test_a_pinned_request_waits_for_a_server_of_its_version() -> None:
    """Replicas of another version are not asked, and the wait is bounded and says what was waited for."""
    one, two = scripted(), scripted()
    two.weight_version = "3"
    async with open_client({URL: one, OTHER: two}) as sampler:
        sampler.serving(URL, 0)
        key = key_of(URL, URL, OTHER)
        with pytest.raises(ServerUnavailable, match="with version 3 within 120 s"):
            await sampler.sample(make_request(key, version=3, replica=True))
        sampler.serving(OTHER, 3)
        assert (await sampler.sample(make_request(key, version=3, replica=True))).server == OTHER
        assert (await sampler.sample(make_request(key, version=0, replica=True))).server == URL
        # What a server that went out holds is anybody's guess.
        sampler.claim(None, _never)
        sampler.quarantine(OTHER, "test")
        assert pool_of(sampler).version(OTHER) is None


async def test_a_replica_that_answers_with_another_version_is_looked_at_and_asked_no_more() -> None:
    """A mix of versions that nobody told of is no younger token: another server is asked."""
    one, two = scripted(), scripted()
    two.weight_version = "2"
    async with open_client({URL: one, OTHER: two}) as sampler:
        sampler.serving(URL, 2)
        sampler.serving(OTHER, 2)
        names = watch(sampler)
        segment = await sampler.sample(make_request(key_of(URL, URL, OTHER), version=2, replica=True))
        assert (len(one.generated), segment.server) == (1, OTHER)
        await anyio.sleep(1)
        assert names == ["server_returned"]


async def test_requests_on_older_prefixes_are_aborted_and_waited_for() -> None:
    """They come back with what they have; younger ones go on."""
    one = scripted()
    one.fault("/generate", *[Fault(hold=True)] * 3)
    stops: dict[str, StopReason] = {}
    async with open_client({URL: one}) as sampler, anyio.create_task_group() as tasks:

        async def sample(key: str, **changes: Any) -> None:
            stops[key] = (await sampler.sample(make_request(key, **changes))).stop

        tasks.start_soon(
            sample,
            "older prefix",
        )
        tasks.start_soon(sample, "unanchored")
        await one.wait_until(lambda: one.in_flight == 2)
        tasks.start_soon(lambda: sample("younger", version=5, anchor=5))
        await one.wait_until(lambda: one.in_flight == 3)
        await sampler.abort_older(URL, 5)
        assert set(stops) == {"older prefix", "unanchored"}
        assert set(stops.values()) == {StopReason.ABORT}
        one.release()
    assert stops["younger"] is not StopReason.ABORT


async def test_a_request_that_ignores_its_abort_is_taken_away_after_half_a_minute() -> None:
    """The update that waits for it goes on."""
    one = scripted()
    one.fault("/generate", Fault(hold=True))
    one.fault("/abort_request", *[Fault(ignore=True)] * 100)
    async with open_client({URL: one}) as sampler, anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.sample, make_request("t"))
        await one.wait_until(lambda: one.in_flight == 1)
        await sampler.abort_older(URL, 1)
        assert anyio.current_time() == 30
        tasks.cancel_scope.cancel()


async def test_a_request_is_clipped_to_the_servers_context_or_refused_without_being_sent() -> None:
    """One request within the context, then a typed error: nothing is asked twice."""
    one = scripted(limits=ScriptedLimits(context_length=32))
    async with open_client({URL: one}) as sampler:
        room = sampler.context_tokens
        assert room is not None
        await sampler.sample(make_request("t", ids=range(room - 2), max_new_tokens=100))
        assert [call.sampling_params["max_new_tokens"] for call in one.generated] == [2]
        with pytest.raises(RequestRefused, match=f"context of {room} tokens"):
            await sampler.sample(make_request("t", ids=range(room)))
    assert len(one.generated) == 1


async def test_the_smallest_context_counts_and_no_smaller_one_joins() -> None:
    """What a trajectory may rely on holds wherever it is sampled."""
    sizes = {URL: 100, OTHER: 64, THIRD: 32}
    servers = {url: scripted(limits=ScriptedLimits(context_length=size)) for url, size in sizes.items()}
    async with open_client(servers, urls=[URL, OTHER]) as sampler:
        relied_on = sampler.context_tokens
        sampler.add(THIRD)
        await anyio.sleep(100)
        assert sampler.context_tokens == relied_on
        assert THIRD not in [control.url for control in sampler.live]


async def test_servers_of_unknown_versions_are_refused_with_those_that_work() -> None:
    """Unless somebody has checked them."""
    one = scripted()
    one.fault("/server_info", *[Fault(edit=lambda reply: reply.update(version="0.4.9"))] * 2)
    with pytest.raises(ConfigError, match=r"version '0\.4\.9'; known to work are 0\.5\.23"):
        async with open_client({URL: one}):
            pass
    async with open_client({URL: one}, allow_version=True):
        pass


class _Router(ScriptedServer):
    """Sends requests to its servers in turn, and knows nothing else."""

    def __init__(self, *servers: ScriptedServer) -> None:
        super().__init__()
        self.keys: list[str] = []
        self._behind = servers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Route one request."""
        assert scope["path"] == "/generate", scope["path"]
        self.keys.append(dict(scope["headers"])[b"x-smg-routing-key"].decode())
        await self._behind[len(self.keys) % len(self._behind)](scope, receive, send)


async def test_behind_a_router_only_sampling_goes_through_it() -> None:
    """It gets the affinity key; control and aborts reach each server."""
    one, two = scripted(), scripted()
    router = _Router(one, two)
    async with open_client({URL: one, OTHER: two, ROUTER: router}, urls=[URL, OTHER], router=ROUTER) as sampler:
        segment = await sampler.sample(make_request("group 1/2"))
        assert segment.server == ""
        assert router.keys == ["group%201/2"]
        assert len(sampler.live) == 2
        two.fault("/generate", Fault(hold=True))
        one.fault("/generate", Fault(hold=True))
        with anyio.move_on_after(1):
            await sampler.sample(make_request("t"))
        assert one.aborted == two.aborted
        assert len(one.aborted) == 1
        assert one.in_flight == two.in_flight == 0


async def test_behind_a_router_nothing_is_retried_and_no_server_blamed() -> None:
    """A retried request is the router's affair; which server answered badly is not known."""
    one = scripted()
    router = _Router(one)
    one.fault("/generate", Fault(status=503), Fault(edit=lambda reply: reply["meta_info"].pop("finish_reason")))
    async with open_client({URL: one, ROUTER: router}, urls=[URL], router=ROUTER) as sampler:
        with pytest.raises(ServerUnavailable, match=ROUTER):
            await sampler.sample(make_request("t"))
        assert len(router.keys) == 1
        with pytest.raises(ProtocolError):
            await sampler.sample(make_request("t"))
        assert len(sampler.live) == 1


async def test_a_router_and_pinned_versions_exclude_each_other() -> None:
    """A router cannot know which server has which version."""
    one = scripted()
    async with open_client({URL: one, ROUTER: _Router(one)}, urls=[URL], router=ROUTER) as sampler:
        with pytest.raises(ConfigError, match=r"sampler\.router is set"):
            await sampler.sample(make_request("t", replica=True))


def test_a_router_needs_a_url() -> None:
    """It is checked as those of servers are."""
    with pytest.raises(ConfigError, match=r"sampler\.router"):
        SGLang([URL], router="router:1", transport=network({}))


async def _never(control: ServerControl) -> None:
    raise PublicationError("test")
