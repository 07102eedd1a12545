"""What a sampler says about itself, and what it is told when it is opened."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import asyncrl as rl
from asyncrl.errors import RequestRefused
from asyncrl.events import Event, Events, Notice
from asyncrl.sampling.backend import as_backend
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing import ScriptedLearner, ScriptedPublisher, ScriptedSampler
from asyncrl.testing.server import network
from asyncrl.types import Segment
from tests.sampling.clients import OTHER, URL, make_request, scripted

pytestmark = pytest.mark.virtual_clock


class _Two:
    """A sampler of somebody's own, with the two methods that it needs."""

    def __init__(self) -> None:
        self.is_open = False
        self._inner = ScriptedSampler()

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        self.is_open = True
        yield
        self.is_open = False

    async def sample(self, request: SegmentRequest) -> Segment:
        assert self.is_open
        return await self._inner.sample(request)


async def test_a_sampler_needs_two_methods() -> None:
    """Whatever else is asked has the answer of one without servers."""
    own = _Two()
    policy = rl.Policy(ScriptedLearner(), sampler=own, publisher=ScriptedPublisher())
    assert not policy.opens_connections
    async with policy.opened(Events()) as opened:
        sampler = opened.sampler
        assert own.is_open
        assert len((await sampler.sample(make_request("t"))).tokens) > 0
        assert (sampler.fleet, sampler.context_tokens) == (None, None)
        assert (sampler.starts_servers, sampler.may_be_many) == (False, False)
        assert (sampler.server_of("t"), sampler.oldest_call()) == (None, None)
        sampler.on_capacity(lambda capacity: pytest.fail("nothing bounds it"))()
    assert not own.is_open


async def test_a_sampler_without_servers_needs_a_publisher() -> None:
    """There is nothing that ours could publish to."""
    with pytest.raises(TypeError, match="needs a publisher of its own"):
        rl.Policy(ScriptedLearner(), sampler=_Two())


def test_a_backend_is_taken_as_it_is() -> None:
    """It says itself what it is."""
    one, many = SGLang([URL]), SGLang([URL, OTHER])
    assert as_backend(one) is one
    assert (one.may_be_many, many.may_be_many) == (False, True)
    assert one.opens_connections and not one.starts_servers
    assert SGLang.embedded(Path("model")).starts_servers


@pytest.mark.parametrize(("own", "told", "refused"), [(None, 10, True), (256, 10, False), (None, None, False)])
async def test_the_vocabulary_is_said_when_it_is_opened(own: int | None, told: int | None, refused: bool) -> None:
    """Unless the client was made with another."""
    sampler = SGLang([URL], transport=network({URL: scripted()}), vocab_size=own)
    async with sampler.opened(vocab_size=told):
        request = make_request("t")
        request.input_ids = np.array([1, 10], dtype=np.int32)
        if refused:
            with pytest.raises(RequestRefused, match="token id 10 is outside of the vocabulary of 10 ids"):
                await sampler.sample(request)
        else:
            await sampler.sample(request)


async def test_events_of_servers_are_told_to_whoever_opens_it() -> None:
    """As long as it is open."""
    sampler = SGLang([URL, OTHER], transport=network({URL: scripted(), OTHER: scripted()}))
    events, seen = Events(), list[Event]()
    events.subscribe(seen.append, kinds=(Notice,))
    async with sampler.opened(events=events):
        sampler.remove(OTHER)
    sampler.fleet.notice("later")
    assert [event.name for event in seen if isinstance(event, Notice)] == ["server_removed"]
