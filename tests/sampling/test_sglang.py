"""The client of sampling servers, against scripted ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.errors import ConfigError, ProtocolError, RequestRefused, ServerUnavailable
from asyncrl.events import Event, Notice
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.pool import rendezvous
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.server import Fault, ScriptedServer, network
from asyncrl.testing.theta import theta_logprobs, write_theta
from asyncrl.types import StopReason

pytestmark = pytest.mark.virtual_clock
URL, OTHER = "http://one:30000", "http://two:30000"


def _request(
    *, key: str = "t", ids: tuple[int, ...] = (1, 2, 3), adapter: str | None = None, max_new_tokens: int = 4
) -> SegmentRequest:
    return SegmentRequest(
        trajectory_id=key,
        input_ids=np.array(ids, dtype=np.int32),
        max_new_tokens=max_new_tokens,
        version=0,
        adapter=adapter,
        extra_key="v0",
    )


def _server(**options: Any) -> ScriptedServer:
    scripted = ScriptedServer(**options)
    scripted.weight_version = "0"
    return scripted


@asynccontextmanager
async def _client(servers: Mapping[str, ScriptedServer], **options: Any) -> AsyncGenerator[SGLang, None]:
    sampler = SGLang(list(servers), transport=network(servers), **options)
    async with sampler.opened():
        yield sampler


def _key_of(url: str) -> str:
    """A trajectory that sticks to ``url`` of the two."""
    return next(str(key) for key in range(100) if rendezvous(str(key), (URL, OTHER)) == url)


def _watch(sampler: SGLang) -> list[str]:
    names: list[str] = []

    def note(event: Event) -> None:
        assert isinstance(event, Notice)
        names.append(event.name)

    sampler.events.subscribe(note, kinds=(Notice,))
    return names


async def test_ids_go_in_and_ids_come_out() -> None:
    """The segment has the ids that were served, not those of its text, and exact log-probabilities."""
    one = _server(tokens=lambda call: [7, 8, 9])
    async with _client({URL: one}) as sampler:
        segment = await sampler.sample(_request(ids=(5, 6)))
    assert segment.tokens.tolist() == [7, 8, 9]
    assert np.array_equal(segment.logprobs, theta_logprobs([7, 8, 9], 0.0))
    assert segment.server == URL
    assert one.generated[0].input_ids == (5, 6)
    assert one.generated[0].extra_key == "v0"


async def test_a_full_server_is_tried_again_with_a_new_rid() -> None:
    """503 backs off; the second attempt has another id of the same length, and the first one is aborted."""
    one = _server()
    one.fault("/generate", Fault(status=503))
    async with _client({URL: one}) as sampler:
        await sampler.sample(_request())
        first, second = (body["rid"] for route, body in one.calls if route == "/generate")
        assert first != second
        assert len(first) == len(second)
        assert one.aborted == [first]
        assert anyio.current_time() > 0.2


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(status=503), Fault(drop=True)])
async def test_attempts_are_bounded_and_the_error_has_every_reason(fault: Fault) -> None:
    """After the retries the caller gets one error that names the server."""
    one = _server()
    one.fault("/generate", *[fault] * 10)
    async with _client({URL: one}, retries=2) as sampler:
        with pytest.raises(ServerUnavailable, match=f"3 attempts.*{URL}"):
            await sampler.sample(_request())
    assert sum(route == "/generate" for route, _ in one.calls) == 3


async def test_a_refusal_is_final_and_has_the_servers_words() -> None:
    """4xx is asked once."""
    one = _server()
    one.fault("/generate", Fault(status=400, body=b'{"error":{"message":"the input is too long"}}'))
    async with _client({URL: one}) as sampler:
        with pytest.raises(RequestRefused, match="the input is too long"):
            await sampler.sample(_request())
        assert sum(route == "/generate" for route, _ in one.calls) == 1


async def test_a_cut_connection_moves_the_request_to_another_server() -> None:
    """The next attempt avoids the server that lost it, and what may still run there is aborted."""
    one, two = _server(), _server()
    one.fault("/generate", Fault(lose=True))
    async with _client({URL: one, OTHER: two}) as sampler:
        segment = await sampler.sample(_request(key=_key_of(URL)))
        assert segment.server == OTHER
        assert one.aborted == [one.generated[0].rid]


async def test_a_dead_server_loses_its_requests_and_comes_back_only_when_restored() -> None:
    """A server that was away gets no request until it was brought back to the policy."""
    one, two = _server(), _server()
    restored: list[str] = []

    async def restore(control: ServerControl) -> None:
        await control.model_info()
        restored.append(control.url)

    async with _client({URL: one, OTHER: two}) as sampler:
        sampler.claim(None, restore)
        names = _watch(sampler)
        one.down = True
        assert (await sampler.sample(_request(key=_key_of(URL)))).server == OTHER
        await anyio.sleep(86_400)
        assert names[0] == "server_quarantined"
        assert (await sampler.sample(_request(key=_key_of(URL)))).server == OTHER
        one.down = False
        assert restored == []
        await anyio.sleep(60)
        assert restored == [URL]
        assert names == ["server_quarantined", "server_returned"]
        assert (await sampler.sample(_request(key=_key_of(URL)))).server == URL


async def test_quarantine_takes_running_requests_away() -> None:
    """What a server computes after it went wrong is not used: the request is aborted there and runs elsewhere."""
    one, two = _server(), _server()
    one.fault("/generate", Fault(hold=True))
    async with _client({URL: one, OTHER: two}) as sampler:
        servers: list[str] = []

        async def sample() -> None:
            servers.append((await sampler.sample(_request(key=_key_of(URL)))).server)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample)
            await one.wait_until(lambda: one.in_flight == 1)
            sampler.quarantine(URL, "test")
        assert servers == [OTHER]
        assert one.aborted == [one.generated[0].rid]


async def test_without_any_server_the_wait_is_bounded() -> None:
    """An outage of all servers ends in an error that names them."""
    one = _server()
    async with _client({URL: one}) as sampler:
        one.down = True
        with pytest.raises(ServerUnavailable, match=f"{URL} came back within 120 s"):
            await sampler.sample(_request())


async def test_cancelling_aborts_the_request_where_it_runs() -> None:
    """Cancellation ends the request on the server and is not swallowed."""
    one = _server()
    one.fault("/generate", Fault(hold=True))
    async with _client({URL: one}) as sampler:
        with anyio.move_on_after(1) as scope:
            await sampler.sample(_request())
        assert scope.cancelled_caught
        assert one.aborted == [one.generated[0].rid]
        assert one.in_flight == 0


async def test_a_server_that_hangs_in_the_abort_does_not_hold_the_cancelled_task() -> None:
    """The abort has a few seconds."""
    one = _server()
    one.fault("/generate", Fault(hold=True))
    one.fault("/abort_request", Fault(hold=True))
    async with _client({URL: one}) as sampler:
        with anyio.move_on_after(1) as scope:
            await sampler.sample(_request())
        assert scope.cancelled_caught
        assert anyio.current_time() == 6


async def test_an_aborted_segment_keeps_its_tokens() -> None:
    """An abort from outside is an answer and not an error; the caller goes on from its tokens."""
    one = _server()
    one.fault("/generate", Fault(hold=True))
    segments = []
    async with _client({URL: one}) as sampler:

        async def sample() -> None:
            segments.append(await sampler.sample(_request(max_new_tokens=6)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample)
            await one.wait_until(lambda: one.in_flight == 1)
            await sampler.live[0].abort(one.generated[0].rid)
    assert segments[0].stop is StopReason.ABORT
    assert len(segments[0].tokens) == 3


def _shorten(reply: dict[str, Any]) -> None:
    reply["meta_info"]["output_token_logprobs"].pop()


def _remove(reply: dict[str, Any]) -> None:
    del reply["meta_info"]["output_token_logprobs"]


def _mislabel(reply: dict[str, Any]) -> None:
    reply["meta_info"]["weight_version"] = "default"
    reply["meta_info"]["weight_versions"] = [{"version": "default", "start": 0, "end": 4}]


@pytest.mark.parametrize("edit", [_shorten, _remove])
async def test_an_answer_that_must_not_be_trained_is_an_error_and_a_reason_to_look(
    edit: Callable[[dict[str, Any]], None],
) -> None:
    """Nothing is padded or guessed, and the server is looked at before its next request."""
    one = _server()
    one.fault("/generate", Fault(edit=edit))
    async with _client({URL: one}) as sampler:
        names = _watch(sampler)
        with pytest.raises(ProtocolError, match=URL):
            await sampler.sample(_request())
        await sampler.sample(_request())
        assert names == ["server_returned"]


async def test_an_answer_of_unknown_weights_is_asked_for_again() -> None:
    """As of a server that was started anew: it is looked at first, and its tokens are nobody's."""
    one = _server()
    one.fault("/generate", Fault(edit=_mislabel))
    async with _client({URL: one}) as sampler:
        names = _watch(sampler)
        segment = await sampler.sample(_request())
        assert [span.version for span in segment.versions] == [_request().version]
        assert len(one.generated) == 2
        assert names == ["server_returned"]


async def test_a_restarted_server_that_lost_the_adapter_is_restored_and_asked_again(tmp_path: Any) -> None:
    """ "Never loaded" from a server that had it is not the request's fault."""
    one = _server()
    write_theta(tmp_path, 0.5)

    async def restore(control: ServerControl) -> None:
        await control.load_adapter("a", tmp_path)

    async with _client({URL: one}) as sampler:
        sampler.claim(None, restore)
        await restore(sampler.live[0])
        one.restart()
        segment = await sampler.sample(_request(adapter="a"))
        assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, 0.5))


@pytest.mark.parametrize("ids", [(1, 64), (-1, 2)])
async def test_ids_outside_of_the_vocabulary_never_leave(ids: tuple[int, ...]) -> None:
    """Some servers do not survive such an id, so it is refused here."""
    one = _server(tokens=lambda call: [7, 63])
    async with _client({URL: one}, vocab_size=64) as sampler:
        with pytest.raises(RequestRefused, match="outside of the vocabulary of 64"):
            await sampler.sample(_request(ids=ids))
        await sampler.sample(_request(ids=(63, 0)))
    assert len(one.generated) == 1


async def test_opening_names_every_server_that_does_not_answer() -> None:
    """A wrong URL is a fault of the configuration, found before anything starts."""
    servers = {URL: _server(), OTHER: _server(), "http://three:1": _server()}
    servers[OTHER].down = servers["http://three:1"].down = True
    with pytest.raises(ConfigError, match=r"no server at URL http://three:1.*no server at URL http://two:30000"):
        async with _client(servers):
            pass


async def test_opening_does_not_wait_for_a_silent_server() -> None:
    """The check has a deadline."""
    one = _server()
    one.fault("/model_info", Fault(hold=True))
    with pytest.raises(ConfigError, match=f"no server at URL {URL}"):
        async with _client({URL: one}):
            pass
    assert anyio.current_time() == 30


@pytest.mark.parametrize("urls", [[], "http://a", ["a:1"], ["http://a", "http://a/"]])
def test_urls_are_checked(urls: Any) -> None:
    """No URL, a text in the place of a list, a bare host and a double are told before anything starts."""
    with pytest.raises(ConfigError, match=r"sampler\.urls"):
        SGLang(urls)


async def test_sampling_and_control_have_their_own_keys() -> None:
    """Servers with two keys refuse the wrong one on either side."""
    one = _server()
    async with _client({URL: one}, api_key="data", admin_key="admin") as sampler:
        await sampler.sample(_request())
        await sampler.live[0].flush()
    assert one.authorizations["/generate"] == "Bearer data"
    assert one.authorizations["/model_info"] == "Bearer data"
    assert one.authorizations["/flush_cache"] == "Bearer admin"


async def test_trajectories_are_sticky_and_spread_over_servers() -> None:
    """Each trajectory keeps its server, and all servers get some."""
    one, two = _server(), _server()
    async with _client({URL: one, OTHER: two}) as sampler:
        for _ in range(3):
            for key in range(20):
                await sampler.sample(_request(key=str(key), ids=(key, 1)))
    keys = [{call.input_ids[0] for call in scripted.generated} for scripted in (one, two)]
    assert not keys[0] & keys[1]
    assert all(len(found) > 4 for found in keys)


async def test_three_hundred_requests_are_really_in_flight() -> None:
    """Nothing between the caller and the server holds requests back."""
    one = _server(seconds=lambda call: 10.0)
    async with _client({URL: one}) as sampler, anyio.create_task_group() as tasks:
        for key in range(300):
            tasks.start_soon(sampler.sample, _request(key=str(key)))
    assert one.peak_in_flight == 300
