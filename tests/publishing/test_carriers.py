"""Full weights in requests and through a process group, against scripted servers, which join no group."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.errors import ProbeMismatch
from asyncrl.publishing.carriers import TensorCarrier, is_local
from asyncrl.publishing.distributed import DistributedCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.server import Fault, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, theta_logprobs
from asyncrl.types import FloatArray, Segment
from tests.publishing.versions import version_of

URL, OTHER, THIRD = "http://127.0.0.1:30001", "http://127.0.0.1:30002", "http://127.0.0.1:30003"
PROBE = Probe(tokens=np.arange(8, dtype=np.int32))
PHASE_S = 50.0


class Learner(ThetaLearner):
    """Three tensors, so that there is more than one bucket; theta is in the last name."""

    async def weights(self) -> Mapping[str, FloatArray]:
        filler = {f"layer.{i}": np.zeros(4, dtype=np.float32) for i in range(2)}
        return {**filler, **await super().weights()}


class Group:
    """A process group that sends nothing, and what it was used for."""

    def __init__(self, groups: list[Group], listener: socket.socket, options: Mapping[str, Any]) -> None:
        listener.close()
        groups.append(self)
        self.name = str(options["name"])
        self.options = options
        self.broadcasts = 0
        self.closed = False

    def join(self) -> None:
        assert not self.closed

    def broadcast(self, flat: Any) -> None:
        assert not self.closed
        self.broadcasts += 1

    def close(self) -> None:
        self.closed = True


class Run:
    """A learner, servers and the publisher between them."""

    def __init__(self, servers: dict[str, ScriptedServer], way: str) -> None:
        self.learner = Learner(lora_rank=None)
        self.sampler = SGLang(list(servers), transport=network(servers))
        self.groups: list[Group] = []
        self.distributed = DistributedCarrier(
            self.learner, phase_s=PHASE_S, bucket_bytes=16, open_group=self._open_group
        )
        carrier = self.distributed if way == "distributed" else TensorCarrier(self.learner, bucket_bytes=16)
        self.publisher = FullPublisher(self.learner, self.sampler, carrier, probe=PROBE)

    def _open_group(self, listener: socket.socket, **options: Any) -> Group:
        return Group(self.groups, listener, options)

    async def publish(self, *versions: int) -> None:
        for version in versions:
            self.learner.theta = version / 10
            await self.publisher.stage(version)
            await self.publisher.publish(version)

    async def sample(self, version: int, key: str = "t") -> Segment:
        request = SegmentRequest(
            trajectory_id=key,
            input_ids=np.arange(3, dtype=np.int32),
            max_new_tokens=4,
            version=version,
            extra_key=self.publisher.model_ref(version).extra_key,
        )
        return await self.sampler.sample(request)

    @property
    def live(self) -> list[str]:
        return [server.url for server in self.sampler.live]


@asynccontextmanager
async def _running(*servers: ScriptedServer, way: str) -> AsyncGenerator[Run, None]:
    run = Run(dict(zip((URL, OTHER, THIRD), servers, strict=False)), way)
    async with run.sampler.opened():
        yield run


def _bodies(server: ScriptedServer, route: str) -> list[Mapping[str, Any]]:
    return [body for name, body in server.calls if name == route]


UPDATES = {"tensors": "/update_weights_from_tensor", "distributed": "/update_weights_from_distributed"}


@pytest.mark.parametrize("way", ["tensors", "distributed"])
async def test_weights_come_in_buckets_and_the_last_one_makes_the_version(way: str) -> None:
    """Inside a session, inside a pause, without the flush that SGLang would refuse; the flush comes by itself after."""
    one = ScriptedServer()
    async with _running(one, way=way) as run:
        await run.publish(0, 1)
        segment = await run.sample(1)
        assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, 0.1))
        assert [span.version for span in segment.versions] == [1]
    bodies = _bodies(one, UPDATES[way])
    labels = [body["weight_version"] for body in bodies]
    assert [label and version_of(label) for label in labels] == [None, None, 0, None, None, 1]
    assert all(body["flush_cache"] is False and body["load_format"] == "flattened_bucket" for body in bodies)
    order = [route for route, _ in one.calls]
    change = ["/begin_weight_update", *[UPDATES[way]] * 3, "/end_weight_update", "/flush_cache"]
    start = order.index("/begin_weight_update")
    assert order[start : start + len(change)] == change
    assert order.index("/pause_generation") < start < order.index("/continue_generation")


@pytest.mark.parametrize("way", ["tensors", "distributed"])
async def test_the_staged_copy_is_what_travels(way: str) -> None:
    """The learner has moved on when a version is published."""
    one = ScriptedServer()
    async with _running(one, way=way) as run:
        await run.publisher.stage(0)
        run.learner.theta = 5.0
        assert await run.publisher.publish(0) == 0.0
        assert one.base_theta == 0.0


async def test_each_tensor_parallel_rank_gets_a_payload() -> None:
    """A server reads only its own; with one too few it could not."""
    one = ScriptedServer()
    one.fault("/server_info", *[Fault(edit=lambda reply: reply.update(tp_size=2))] * 9)
    async with _running(one, way="tensors") as run:
        await run.publish(0)
    payloads = [body["serialized_named_tensors"] for body in _bodies(one, UPDATES["tensors"])]
    assert [len(ranks) for ranks in payloads] == [2, 2, 2]
    assert all(first == second for first, second in payloads)


async def test_one_group_has_all_servers_and_is_kept() -> None:
    """We are rank 0, each server has the ranks after those before it, and a second version needs no second group."""
    one, two = ScriptedServer(), ScriptedServer()
    one.fault("/server_info", *[Fault(edit=lambda reply: reply.update(tp_size=2))] * 9)
    async with _running(one, two, way="distributed") as run:
        await run.publish(0, 1)
        (group,) = run.groups
        assert group.broadcasts == 6
        assert group.options["world_size"] == 4
        assert group.options["backend"] == "gloo"
        (first,) = _bodies(one, "/init_weights_update_group")
        (second,) = _bodies(two, "/init_weights_update_group")
        assert (first["rank_offset"], second["rank_offset"]) == (1, 3)
        assert first["master_port"] == second["master_port"]
        await run.distributed.close()
        assert group.closed
    assert _bodies(one, "/destroy_weights_update_group") == [{"group_name": group.name}]


@pytest.mark.virtual_clock
async def test_a_returning_server_has_a_group_of_its_own_and_then_all_have_a_new_one() -> None:
    """The group that was is of no use to a process that never joined it."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(one, two, way="distributed") as run:
        await run.publish(0)
        two.restart()
        run.sampler.quarantine(OTHER, "test")
        await anyio.sleep(10)
        assert run.live == [URL, OTHER]
        assert two.base_theta == 0.0 and version_of(two) == 0
        await run.publish(1)
        assert version_of(one) == version_of(two) == 1
        assert [group.options["world_size"] for group in run.groups] == [3, 2, 3]
        assert [group.closed for group in run.groups] == [True, True, False]


_BROKEN = [
    ("/init_weights_update_group", Fault(status=500)),
    ("/init_weights_update_group", Fault(hold=True)),
    ("/begin_weight_update", Fault(status=500)),
    ("/update_weights_from_distributed", Fault(status=400)),
    ("/update_weights_from_distributed", Fault(hold=True)),
    ("/update_weights_from_distributed", Fault(drop=True)),
    ("/end_weight_update", Fault(drop=True)),
]


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("route", "fault"), _BROKEN)
async def test_one_server_that_fails_does_not_cost_the_others_a_version(route: str, fault: Fault) -> None:
    """The broadcast to all fails, and each is served by itself: in time, out of the broken group."""
    one, two, three = ScriptedServer(), ScriptedServer(), ScriptedServer()
    async with _running(one, two, three, way="distributed") as run:
        await run.publish(0)
        run.sampler.quarantine(THIRD, "test")
        await anyio.sleep(10)
        two.fault(route, *[fault] * 2)
        await run.publish(1)
        assert anyio.current_time() < 10 + run.sampler.timeouts.publication_s
        assert run.live == [URL, THIRD]
        assert version_of(one) == version_of(three) == 1
        assert run.groups[0].closed
        two.release()
        await anyio.sleep(100)
        assert run.live == [URL, OTHER, THIRD]
        assert version_of(two) == 1
        assert two.paused is None


@pytest.mark.virtual_clock
async def test_a_server_that_never_pauses_holds_up_the_others_for_one_phase() -> None:
    """They go on without it."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(one, two, way="distributed") as run:
        two.fault("/pause_generation", Fault(hold=True))
        await run.publish(0)
        assert run.live == [URL]
        assert [group.options["world_size"] for group in run.groups] == [2]
        paused = [route for route, _ in one.calls if route in ("/pause_generation", "/continue_generation")]
        assert paused == ["/pause_generation", "/continue_generation"]


@pytest.mark.parametrize("way", ["tensors", "distributed"])
@pytest.mark.virtual_clock
async def test_a_session_that_was_left_open_is_closed_first(way: str) -> None:
    """By a trainer that was killed, or by an update that failed in the middle."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(one, two, way=way) as run:
        await run.sampler.live[0].begin_update()
        await run.publish(0)
        assert run.live == [URL, OTHER]
        two.fault(UPDATES[way], *[Fault(status=500)] * 2)
        await run.publish(1)
        assert run.live == [URL]
        await anyio.sleep(10)
        assert version_of(two) == 1


@pytest.mark.parametrize("way", ["tensors", "distributed"])
async def test_weights_that_were_acknowledged_and_not_applied_stop_the_run(way: str) -> None:
    """The version is right and the weights are not: only the probe sees it."""
    one = ScriptedServer()
    async with _running(one, way=way) as run:
        await run.publish(0)
        one.fault(UPDATES[way], Fault(), Fault(), Fault(edit=lambda reply: setattr(one, "base_theta", 0.0)))
        with pytest.raises(ProbeMismatch, match="does not hold version 1"):
            await run.publish(1)


@pytest.mark.parametrize("way", ["tensors", "distributed"])
async def test_only_the_newest_copy_is_kept(way: str) -> None:
    """Memory does not grow with the run."""
    async with _running(ScriptedServer(), way=way) as run:
        await run.publish(*range(5))
        kept = []
        for version in range(5):
            try:
                run.publisher._carrier.store.weights(version)  # type: ignore[attr-defined]
            except KeyError:
                continue
            kept.append(version)
        assert kept == [4]


@pytest.mark.virtual_clock
async def test_cancellation_in_the_middle_leaves_no_server_paused_and_no_group_open() -> None:
    """Whatever ends the run."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(one, two, way="distributed") as run:
        two.fault(UPDATES["distributed"], Fault(hold=True))
        with anyio.move_on_after(5):
            await run.publish(0)
        assert one.paused is None and two.paused is None
        assert [group.closed for group in run.groups] == [True]


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://localhost:30000", True),
        ("http://[::1]:30000", True),
        ("http://10.0.0.7:30000", False),
        ("https://gpu-7.cluster:443", False),
    ],
)
def test_which_servers_can_open_our_memory(url: str, local: bool) -> None:
    """Handles of GPU memory mean nothing on another machine."""
    assert is_local(url) is local
