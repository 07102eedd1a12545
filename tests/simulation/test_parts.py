from __future__ import annotations

import random
from dataclasses import replace

import anyio
import pytest

from asyncrl.sampling.base import SegmentRequest
from asyncrl.simulation.cost import LoadModel
from asyncrl.simulation.parts import Playback, ScriptedEnv, SimulatedPublisher, SimulatedSampler, blank
from asyncrl.testing.clock import run_virtual
from asyncrl.types import StopReason, Trajectory
from tests.simulation.recording import workload


def _request(context: int, key: str, *, most: int = 10) -> SegmentRequest:
    return SegmentRequest(
        trajectory_id="000000-000", input_ids=blank(context), max_new_tokens=most, version=3, extra_key=key
    )


def test_only_what_is_not_in_the_cache_is_computed() -> None:
    """A second for each uncached token: 5 of the prompt, none to go on with a turn, all 9 of another namespace."""
    script = workload(tokens=6)
    load = LoadModel(own=(0.0, 0.0, 1.0), shared=(0.0, 0.0, 0.0))

    async def main() -> list[float]:
        sampler = SimulatedSampler(Playback(script.groups), load, source=random.Random(0))
        times = []
        for request in (_request(5, "v0", most=2), _request(7, "v0", most=2), _request(9, "v1", most=2)):
            await sampler.sample(request)
            times.append(anyio.current_time())
        return times

    assert run_virtual(main) == pytest.approx([5.0, 5.0, 14.0])


def test_segments_are_of_the_version_that_was_asked_for() -> None:
    """The last one of a turn ends by itself; beyond the script there is an empty one, at once."""
    script = workload(tokens=6, own=0.1)

    async def main() -> None:
        sampler = SimulatedSampler(Playback(script.groups), script.sampling, source=random.Random(0))
        first = await sampler.sample(_request(5, "v3", most=4))
        second = await sampler.sample(_request(9, "v3", most=4))
        assert [(len(part.tokens), part.stop) for part in (first, second)] == [
            (4, StopReason.LENGTH),
            (2, StopReason.STOP),
        ]
        assert [(span.version, span.start, span.end) for span in first.versions] == [(3, 0, 4)]
        assert anyio.current_time() == pytest.approx(0.6)
        third = await sampler.sample(_request(11, "v3"))
        assert (len(third.tokens), third.stop) == (0, StopReason.STOP)
        assert anyio.current_time() == pytest.approx(0.6)

    run_virtual(main)


def test_a_publication_waits_for_what_the_servers_have_in_flight() -> None:
    """One second of its own, and one for each request; the first version is there at once."""
    script = replace(workload(), publication=LoadModel(own=(1.0,), shared=(1.0,)))

    async def main() -> list[float]:
        sampler = SimulatedSampler(Playback(script.groups), script.sampling, source=random.Random(0))
        publisher = SimulatedPublisher(script, sampler.station, random.Random(0), pins_versions=True, lead=0)
        times = []
        with sampler.station.request(), sampler.station.request(), sampler.station.request():
            for version in (0, 1):
                await publisher.publish(version)
                times.append(anyio.current_time())
        await publisher.publish(2)
        assert publisher.published == [0, 1, 2]
        return [*times, anyio.current_time()]

    assert run_virtual(main) == pytest.approx([0.0, 4.0, 6.0])


@pytest.mark.parametrize("truncated", [False, True])
def test_a_conversation_ends_as_it_did(truncated: bool) -> None:
    """By itself after its last turn, or not: then it is left to the budget, which cut it in the run as well."""
    group = workload().groups[0]
    members = tuple(replace(member, truncated=truncated) for member in group.members)
    group = replace(group, members=members)

    async def main() -> bool:
        env = ScriptedEnv(Playback([group]), reset_s=0.0)
        traj = Trajectory(id="000000-000", group=0, member=0, row=group, seed=0, turns=1)
        return await env.on_turn(traj) is not None

    assert run_virtual(main) is truncated
