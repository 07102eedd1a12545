"""What servers can take reaches the engine: their context bounds the budget, and their capacity the requests."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

import asyncrl as rl
from asyncrl.events import Event, Events, Notice
from asyncrl.rollout.env import Env
from asyncrl.sampling.base import ModelRef
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing import ByteRenderer, ScriptedLearner, ScriptedPublisher
from asyncrl.testing.server import ScriptedLimits, ScriptedServer, network
from asyncrl.types import Group, Message, Row, Trajectory, TruncationCause
from tests.sampling.clients import URL, pool_of, scripted

pytestmark = pytest.mark.virtual_clock


class _Talk(Env):
    """Asks again as long as it may."""

    async def reset(self, row: Row) -> list[Message]:
        """The row is the prompt."""
        return [{"role": "user", "content": str(row)}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        """More."""
        return [{"role": "user", "content": "more"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        """None of it is worth anything."""
        return 0.0


class _BaseWeights(ScriptedPublisher):
    """Names no adapters."""

    def model_ref(self, version: int, anchor: int | None = None) -> ModelRef:
        """Whatever the server holds."""
        return ModelRef(adapter=None, extra_key=f"v{version}")


def _engine(server: ScriptedServer, concurrency: int = 4) -> rl.RolloutEngine:
    sampler = SGLang([URL], transport=network({URL: server}))
    policy = rl.Policy(ScriptedLearner(), sampler=sampler, publisher=_BaseWeights())
    schedule = rl.Schedule(concurrency=concurrency)
    return rl.RolloutEngine(policy, env=_Talk, renderer=ByteRenderer(), schedule=schedule)


def _noting(notices: list[Notice]) -> Callable[[Event], None]:
    def note(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append(event)

    return note


async def test_what_does_not_fit_into_the_servers_context_is_truncated_and_not_refused() -> None:
    """A prompt with its answer beyond the context ends as truncated, whatever the recipe allows."""
    server = scripted(limits=ScriptedLimits(context_length=64))
    events, notices = Events(), list[Notice]()
    events.subscribe(_noting(notices))
    async with _engine(server).opened(events) as session:
        await session.publish(0)
        fits = await session.group(0, "p" * 20, 1)
        does_not = await session.group(1, "p" * 90, 1)
    for group in (fits, does_not):
        assert isinstance(group, Group)
        assert [member.truncated for member in group.members_G] == [TruncationCause.CONTEXT]
    assert server.generated
    room = max(call.sampling_params["max_new_tokens"] + len(call.input_ids) for call in server.generated)
    assert room <= 64
    found = [notice for notice in notices if notice.name == "context_limited_by_servers"]
    assert [notice.keys["servers"] for notice in found] == [room]


async def test_requests_wait_in_the_client_while_the_servers_are_full() -> None:
    """They are not born yet, so they do not age; the schedule's own bound stays the upper one."""
    server = scripted(seconds=lambda call: 3600.0, limits=ScriptedLimits(max_running_requests=4))
    async with _engine(server, concurrency=40).opened() as session, anyio.create_task_group() as tasks:
        await session.publish(0)
        for index in range(40):
            tasks.start_soon(session.group, index, "p", 1)
        await anyio.sleep(1)
        assert (session.context.requests.in_use, session.context.requests.waiting) == (40, 0)
        await anyio.sleep(10)
        assert session.context.requests.limit == 20
        sampler = session.policy.sampler
        assert isinstance(sampler, SGLang)
        pool_of(sampler).set_limit(URL, 1000)
        assert session.context.requests.limit == 40
        tasks.cancel_scope.cancel()
