"""Full weights on servers at different versions: a trajectory keeps its version, and nothing crosses an update."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ProbeMismatch, PublicationError, ServerUnavailable, StalenessError
from asyncrl.publishing.carriers import DiskCarrier
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.rolling import RollingPublisher, may_change
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang, Timeouts
from asyncrl.testing.clock import run_virtual
from asyncrl.testing.server import Fault, GenerateCall, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, theta_logprobs
from asyncrl.types import Segment, StopReason
from tests.publishing.versions import version_of

PROBE = Probe(tokens=np.arange(8, dtype=np.int32))


class Run:
    """A learner, servers and the publisher between them."""

    def __init__(self, directory: Path, servers: list[ScriptedServer], outage_s: float = 120.0) -> None:
        self.directory = directory
        self.servers = {f"http://s{number}": server for number, server in enumerate(servers)}
        self.learner = ThetaLearner(lora_rank=None)
        self.sampler = SGLang(
            list(self.servers), transport=network(self.servers), retries=20, timeouts=Timeouts(outage_s=outage_s)
        )
        self.publisher = RollingPublisher(self.learner, self.sampler, DiskCarrier(self.learner, directory), probe=PROBE)

    async def publish(self, *versions: int) -> None:
        for version in versions:
            self.learner.theta = version / 10
            await self.publisher.stage(version)
            await self.publisher.publish(version)

    async def sample(self, version: int, key: str = "t", tokens: int = 4) -> Segment:
        ref = self.publisher.model_ref(version)
        request = SegmentRequest(
            trajectory_id=key,
            input_ids=np.arange(3, dtype=np.int32),
            max_new_tokens=tokens,
            version=version,
            extra_key=ref.extra_key,
            replica=ref.replica,
        )
        return await self.sampler.sample(request)

    @property
    def versions(self) -> list[int]:
        """What each server says it has."""
        return [version_of(server) for server in self.servers.values()]

    def folders(self) -> int:
        """How many versions are on disk."""
        return len(list(self.directory.iterdir()))

    async def settled(self) -> None:
        """Until no change is under way."""
        await anyio.sleep(10)


@asynccontextmanager
async def _running(directory: Path, *servers: ScriptedServer, outage_s: float = 120.0) -> AsyncGenerator[Run, None]:
    run = Run(directory, list(servers), outage_s)
    async with run.sampler.opened():
        yield run


@given(
    serving=st.dictionaries(st.integers(0, 7), st.integers(0, 4), max_size=8),
    held=st.sets(st.integers(0, 5)),
    newest=st.integers(0, 5),
)
def test_no_held_version_loses_its_last_server(serving: dict[int, int], held: set[int], newest: int) -> None:
    """Whatever the state; and every server whose version nobody holds may change."""
    by_url = {str(url): version for url, version in serving.items()}
    changing = may_change(by_url, held, newest)
    left = Counter(version for url, version in by_url.items() if url not in changing)
    for version in by_url.values():
        if version in held or version == newest:
            assert left[version] >= 1
        else:
            assert left[version] == 0
    if newest in by_url.values():
        assert all(by_url[url] not in held for url in changing)


@pytest.mark.virtual_clock
async def test_a_trajectory_keeps_its_version_on_another_server(tmp_path: Path) -> None:
    """Both of two versions answer with their own weights, and each server holds one of them."""
    async with _running(tmp_path, ScriptedServer(), ScriptedServer()) as run:
        await run.publish(0)
        run.publisher.pin(0)
        await run.publish(1)
        await run.settled()
        assert sorted(run.versions) == [0, 1]
        for version in (0, 1):
            for key in "abcdefgh":
                segment = await run.sample(version, key)
                assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, version / 10))
                assert [span.version for span in segment.versions] == [version]
        run.publisher.unpin(0)
        await run.settled()
        assert run.versions == [1, 1]
        with pytest.raises(StalenessError, match="version 0"):
            run.publisher.model_ref(0)


@pytest.mark.virtual_clock
async def test_a_publication_waits_for_the_first_version_that_is_let_go(tmp_path: Path) -> None:
    """With every server at another held version there is no place for a third."""
    async with _running(tmp_path, ScriptedServer(), ScriptedServer()) as run:
        await run.publish(0)
        run.publisher.pin(0)
        await run.publish(1)
        run.publisher.pin(1)
        published: list[float] = []

        async def publish() -> None:
            await run.publish(2)
            published.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            await anyio.sleep(1000)
            assert not published
            assert sorted(run.versions) == [0, 1]
            run.publisher.unpin(0)
        assert sorted(run.versions) == [1, 2]


@pytest.mark.virtual_clock
async def test_what_runs_on_a_server_that_changes_goes_on_at_another(tmp_path: Path) -> None:
    """The tokens so far come back, all of the version that was asked for."""

    def seconds(call: GenerateCall) -> float:
        return 50 if call.sampling_params["max_new_tokens"] > 1 else 0  # a probe samples one token

    one, two = ScriptedServer(seconds=seconds), ScriptedServer(seconds=seconds)
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        run.publisher.pin(0)
        segments: list[Segment] = []

        async def sample(key: str) -> None:
            segments.append(await run.sample(0, key, tokens=6))

        async with anyio.create_task_group() as tasks:
            for key in "abcdefgh":
                tasks.start_soon(sample, key)
            await anyio.sleep(1)
            await run.publish(1)
            assert anyio.current_time() < 40
        stops = Counter(segment.stop for segment in segments)
        assert stops[StopReason.ABORT] >= 1
        assert stops[StopReason.LENGTH] >= 1
        assert {span.version for segment in segments for span in segment.versions} == {0}


@pytest.mark.virtual_clock
async def test_a_server_that_returns_gets_the_newest_version_first(tmp_path: Path) -> None:
    """One that died and came back with base weights takes no request before that."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        await run.publish(1)
        await run.settled()
        two.down = True
        run.sampler.quarantine("http://s1", "it died")
        await anyio.sleep(100)
        two.restart()
        two.down = False
        served = len(two.generated)
        await anyio.sleep(100)
        assert run.versions == [1, 1]
        assert len(two.generated) == served


@pytest.mark.virtual_clock
async def test_a_lost_version_is_brought_back_while_it_is_held(tmp_path: Path) -> None:
    """The only server of a held version died: it returns with that version, because another has the newest."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        run.publisher.pin(0)
        await run.publish(1)
        await run.settled()
        old = next(url for url, server in run.servers.items() if version_of(server) == 0)
        run.servers[old].restart()
        run.sampler.quarantine(old, "it died")
        segment = await run.sample(0)
        assert {span.version for span in segment.versions} == {0}


@pytest.mark.virtual_clock
async def test_a_server_that_applied_nothing_stops_the_run(tmp_path: Path) -> None:
    """The probe sees it before the version is published."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)

        def label(reply: dict[str, object]) -> None:
            one.weight_version = two.weight_version = run.sampler.labels.give(1)

        for server in (one, two):
            server.fault("/update_weights_from_disk", Fault(ignore=True, edit=label))
        with pytest.raises(ProbeMismatch):
            await run.publish(1)


@pytest.mark.virtual_clock
async def test_no_server_left_ends_the_publication(tmp_path: Path) -> None:
    """After the outage limit, with what was tried."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two, outage_s=50) as run:
        await run.publish(0)
        one.down = two.down = True
        with pytest.raises(PublicationError, match="version 1"):
            await run.publish(1)


@pytest.mark.virtual_clock
async def test_fifty_versions_leave_few_folders(tmp_path: Path) -> None:
    """What no server has and nobody holds is removed."""
    async with _running(tmp_path, ScriptedServer(), ScriptedServer(), ScriptedServer()) as run:
        for version in range(50):
            await run.publish(version)
            await run.settled()
        assert run.folders() <= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_no_token_of_another_version_under_chaos(seed: int, tmp_path: Path, threads_in_place: None) -> None:
    """Servers die and come back, trajectories hold versions for random times: every token is of the held version."""
    rng = random.Random(seed)

    async def main() -> None:
        servers = [ScriptedServer(seconds=lambda call: rng.expovariate(0.5)) for _ in range(rng.randint(2, 4))]
        async with _running(tmp_path, *servers) as run:
            await run.publish(0)
            newest = 0
            segments = 0

            async def trajectory(number: int) -> None:
                nonlocal segments
                while True:
                    version = newest
                    run.publisher.pin(version)
                    for turn in range(rng.randint(1, 6)):
                        try:
                            segment = await run.sample(version, f"{number}-{turn}")
                        except ServerUnavailable:
                            break  # its member would be tried again, with the version that is then published
                        segments += 1
                        assert {span.version for span in segment.versions} <= {version}
                        assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, version / 10))
                        await anyio.sleep(rng.expovariate(0.5))
                    run.publisher.unpin(version)

            async def accidents() -> None:
                while True:
                    await anyio.sleep(rng.expovariate(0.02))
                    server = rng.choice(servers)
                    server.restart()
                    server.down = True
                    await anyio.sleep(rng.uniform(1, 30))
                    server.down = False

            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(trajectory, number)
                tasks.start_soon(accidents)
                for version in range(1, 12):
                    await anyio.sleep(rng.uniform(1, 20))
                    await run.publish(version)
                    newest = version
                tasks.cancel_scope.cancel()
            assert segments > 50

    run_virtual(main, seed=seed)


@pytest.mark.virtual_clock
async def test_a_server_that_is_being_changed_gets_no_request(tmp_path: Path) -> None:
    """Its answer would be of weights that nobody asked for; what it has is ended even if it does not pause."""

    def seconds(call: GenerateCall) -> float:
        return 50 if call.sampling_params["max_new_tokens"] > 1 else 0

    one, two = ScriptedServer(seconds=seconds), ScriptedServer(seconds=seconds)
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        run.publisher.pin(0)
        for server in (one, two):
            server.fault("/pause_generation", Fault(ignore=True))
            server.fault("/update_weights_from_disk", Fault(hold=True))
        async with anyio.create_task_group() as tasks:
            for key in "abcdefgh":
                tasks.start_soon(run.sample, 0, key)
            await anyio.sleep(1)
            tasks.start_soon(run.publish, 1)
            await anyio.sleep(1)
            (changing,) = (server for server in (one, two) if not server.in_flight)
            before = len(changing.generated)
            for key in "ijklmnop":
                tasks.start_soon(run.sample, 0, key)
            await anyio.sleep(1)
            assert len(changing.generated) == before
            assert changing.in_flight == 0
            changing.release()


@pytest.mark.virtual_clock
async def test_a_change_and_a_return_do_not_meet_on_one_server(tmp_path: Path) -> None:
    """A server that becomes suspect while it is changed is updated again only afterwards."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        await run.settled()
        for server in (one, two):
            server.fault("/update_weights_from_disk", Fault(hold=True))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.publish, 1)
            await anyio.sleep(1)
            (url,) = (url for url, server in run.servers.items() if server.paused is not None)
            changing = run.servers[url]
            pauses = [route for route, _ in changing.calls].count("/pause_generation")
            run.sampler.suspect(url, "test")
            await anyio.sleep(10)
            assert [route for route, _ in changing.calls].count("/pause_generation") == pauses
            one.release()
            two.release()
        await run.settled()
        one.release()
        two.release()
        await run.settled()
        assert run.versions == [1, 1]
