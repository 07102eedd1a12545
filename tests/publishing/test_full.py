"""Publishing full weights from disk, against scripted servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.errors import ProbeMismatch
from asyncrl.publishing.carriers import DiskCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.base import ModelRef, SegmentRequest
from asyncrl.sampling.pool import rendezvous
from asyncrl.sampling.sglang import SGLang
from asyncrl.sampling.wire import PauseMode
from asyncrl.testing.server import Fault, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, theta_logprobs
from asyncrl.types import Segment, VersionSpan
from tests.publishing.versions import version_of

URL, OTHER = "http://one:30000", "http://two:30000"
PROBE = Probe(tokens=np.arange(8, dtype=np.int32))
CONTROL = ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"]


class Run:
    """A learner, servers and the publisher between them."""

    def __init__(self, directory: Path, servers: dict[str, ScriptedServer], mode: PauseMode) -> None:
        self.learner = ThetaLearner(lora_rank=None)
        self.sampler = SGLang(list(servers), transport=network(servers))
        carrier = DiskCarrier(self.learner, directory)
        self.publisher = FullPublisher(self.learner, self.sampler, carrier, pause_mode=mode, probe=PROBE)

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


@asynccontextmanager
async def _running(directory: Path, *servers: ScriptedServer, mode: PauseMode = "retract") -> AsyncGenerator[Run, None]:
    run = Run(directory, dict(zip((URL, OTHER), servers, strict=False)), mode)
    async with run.sampler.opened():
        yield run


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _control_calls(server: ScriptedServer) -> list[str]:
    return [route for route, _ in server.calls if route in CONTROL]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_weights_change_inside_a_pause(tmp_path: Path, mode: PauseMode) -> None:
    """Pause, update without flush, flush unless frozen requests forbid it, continue; samples are of the version."""
    one = ScriptedServer()
    async with _running(tmp_path, one, mode=mode) as run:
        await run.publish(0, 1)
        expected = [route for route in CONTROL if mode != "in_place" or route != "/flush_cache"]
        assert _control_calls(one) == expected * 2
        update = next(body for route, body in one.calls if route == "/update_weights_from_disk")
        assert update["flush_cache"] is False
        assert next(body for route, body in one.calls if route == "/pause_generation") == {"mode": mode}
        segment = await run.sample(1)
        assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, 0.1))
        assert segment.versions == (VersionSpan(version=1, start=0, end=4),)


async def test_a_request_that_crosses_an_update_has_both_versions(tmp_path: Path) -> None:
    """The server's spans decide which token is of which policy."""
    one = ScriptedServer()
    segments: list[Segment] = []
    async with _running(tmp_path, one) as run:
        await run.publish(0)
        one.fault("/generate", Fault(hold=True))

        async def sample() -> None:
            segments.append(await run.sample(0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample)
            await one.wait_until(lambda: one.in_flight == 1)
            await run.publish(1)
            one.release()
    assert [span.version for span in segments[0].versions] == [0, 1]


async def test_only_the_newest_two_folders_are_kept(tmp_path: Path) -> None:
    """Disk use does not grow with the run."""
    async with _running(tmp_path, ScriptedServer()) as run:
        await run.publish(*range(6))
    assert _names(tmp_path) == ["v000004", "v000005"]


async def test_versions_are_named_by_the_cache_namespace_alone(tmp_path: Path) -> None:
    """There is nothing to pin."""
    async with _running(tmp_path, ScriptedServer()) as run:
        assert not run.publisher.pins_versions
        assert run.publisher.model_ref(3) == ModelRef(adapter=None, extra_key="v3")
        run.publisher.pin(3)
        run.publisher.unpin(3)


def _unsuccessful(reply: dict[str, Any]) -> None:
    reply["success"] = False


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("route", "fault"),
    [
        ("/pause_generation", Fault(status=500)),
        ("/update_weights_from_disk", Fault(status=400)),
        ("/update_weights_from_disk", Fault(edit=_unsuccessful)),
        ("/update_weights_from_disk", Fault(ignore=True)),
        ("/flush_cache", Fault(status=400)),
        ("/continue_generation", Fault(drop=True)),
    ],
)
async def test_a_server_whose_update_fails_is_left_out_and_never_left_paused(
    tmp_path: Path, route: str, fault: Fault
) -> None:
    """It is told to continue whatever failed, gets no request, and comes back with the version.

    A status, a body that says no, a label that did not change; a flush that is refused, after
    which the next attempt comes with a back-off.
    """
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        one.fault(route, fault)
        await run.publish(1)
        assert _control_calls(one)[-1] == "/continue_generation"
        assert [server.url for server in run.sampler.live] == [OTHER]
        await anyio.sleep(10)
        assert version_of(one) == 1
        assert one.paused is None
        assert [server.url for server in run.sampler.live] == [URL, OTHER]


@pytest.mark.virtual_clock
async def test_tokens_of_half_replaced_weights_are_never_used(tmp_path: Path) -> None:
    """A request that waits at a server whose update fails runs elsewhere, although that server goes on too."""
    one, two = ScriptedServer(), ScriptedServer()
    servers: list[str] = []
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        key = next(str(key) for key in range(99) if rendezvous(str(key), (URL, OTHER)) == URL)
        one.fault("/update_weights_from_disk", Fault(hold=True))
        live: list[list[str]] = []
        look = Fault(edit=lambda reply: live.append([server.url for server in run.sampler.live]))
        one.fault("/continue_generation", look)

        async def sample() -> None:
            await one.wait_until(lambda: one.paused is not None)
            servers.append((await run.sample(0, key)).server)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample)
            await run.publish(1)
    assert servers == [OTHER]
    assert live == [[OTHER]]


@pytest.mark.virtual_clock
async def test_a_hanging_update_is_bounded_and_followed_by_continue(tmp_path: Path) -> None:
    """The deadline ends the wait; the server is out and not paused for ever."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        one.fault("/update_weights_from_disk", Fault(hold=True))
        await run.publish(0)
        assert _control_calls(one)[-1] == "/continue_generation"
        assert [server.url for server in run.sampler.live] == [OTHER]


async def test_weights_that_did_not_arrive_stop_the_run(tmp_path: Path) -> None:
    """The server reports the new version and computes with other weights: only the probe can see that.

    So does a pause that one of several workers ignored, or an update that reached only some.
    """
    one = ScriptedServer()
    async with _running(tmp_path, one) as run:
        await run.publish(0)
        one.fault("/update_weights_from_disk", Fault(edit=lambda reply: setattr(one, "base_theta", 0.7)))
        with pytest.raises(ProbeMismatch, match="does not hold version 1"):
            await run.publish(1)


@pytest.mark.virtual_clock
async def test_a_restarted_server_serves_nothing_before_it_is_updated(tmp_path: Path) -> None:
    """It comes back with the weights that it was started with; no such token gets through."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        one.down = True
        for key in range(8):
            assert (await run.sample(0, str(key))).server == OTHER
        one.restart()
        one.down = False
        calls = len(one.calls)
        await anyio.sleep(120)
        assert version_of(one) == 0
        for key in range(8):
            segment = await run.sample(0, str(key))
            assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, 0.0))
        routes = [route for route, _ in one.calls[calls:]]
        assert routes.index("/update_weights_from_disk") < routes.index("/generate")
