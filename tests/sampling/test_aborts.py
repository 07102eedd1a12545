"""Aborts are looked after until the server has nothing of ours that nobody waits for."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asyncrl.events import Event, Notice
from asyncrl.testing.server import Fault, ScriptedServer
from tests.sampling.clients import URL, make_request, open_client, scripted

pytestmark = pytest.mark.virtual_clock


def _load(running: int) -> Fault:
    """The server says that it runs so many."""

    def edit(reply: dict[str, Any]) -> None:
        reply["loads"][0]["num_running_reqs"] = running

    return Fault(edit=edit)


async def test_an_abort_that_was_lost_is_repeated() -> None:
    """The server says that it did it and goes on; its load gives it away, and it is told again."""
    one = scripted()
    one.fault("/generate", Fault(hold=True))
    one.fault("/abort_request", Fault(ignore=True))
    one.fault("/v1/loads", _load(1), _load(1))
    async with open_client({URL: one}) as sampler:
        with anyio.move_on_after(1):
            await sampler.sample(make_request("t"))
        await anyio.sleep(60)
        assert _aborts(one) == [one.generated[0].rid] * 2
        # The first one is about limits, while the request was still there.
        assert sum(route == "/v1/loads" for route, _ in one.calls) == 3


async def test_aborts_without_effect_are_told_with_their_count_and_given_up() -> None:
    """A few tries for all of them together, then one notice; other requests are not touched."""
    one = scripted()
    one.fault("/generate", *[Fault(hold=True)] * 6)
    one.fault("/v1/loads", *[_load(6)] * 1000)
    found: list[Notice] = []

    def note(event: Event) -> None:
        if isinstance(event, Notice):
            found.append(event)

    async with open_client({URL: one}) as sampler, anyio.create_task_group() as kept:
        sampler.events.subscribe(note, kinds=(Notice,))
        kept.start_soon(sampler.sample, make_request("kept"))
        await one.wait_until(lambda: one.in_flight == 1)
        async with anyio.create_task_group() as tasks:
            for key in range(5):
                tasks.start_soon(sampler.sample, make_request(str(key)))
            await one.wait_until(lambda: one.in_flight == 6)
            tasks.cancel_scope.cancel()
        await anyio.sleep(60)
        assert [(notice.name, notice.keys["count"]) for notice in found] == [("requests_not_aborted", 5)]
        assert one.generated[0].rid not in _aborts(one)
        assert len(_aborts(one)) == 5 * 4
        one.release()


async def test_a_hundred_aborts_are_confirmed_by_one_look() -> None:
    """Looks are for a server and not for a request."""
    one = scripted(seconds=lambda call: 100.0)
    async with open_client({URL: one}) as sampler:
        async with anyio.create_task_group() as tasks:
            for key in range(100):
                tasks.start_soon(sampler.sample, make_request(str(key)))
            await one.wait_until(lambda: one.in_flight == 100)
            tasks.cancel_scope.cancel()
        await anyio.sleep(60)
    assert len(one.aborted) == 100
    assert sum(route == "/v1/loads" for route, _ in one.calls) == 1


def _aborts(server: ScriptedServer) -> list[str]:
    return [body["rid"] for route, body in server.calls if route == "/abort_request"]
