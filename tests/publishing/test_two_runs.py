"""Two runs on the same servers: neither trains what the other has published, and neither harms the other unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.errors import ConfigError, ServerUnavailable, WeightsOverwritten
from asyncrl.files import locked
from asyncrl.publishing.carriers import DiskCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.home import run_of
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.rolling import RollingPublisher
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.labels import Writer
from asyncrl.sampling.sglang import SGLang, Timeouts
from asyncrl.testing.server import Fault, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, theta_logprobs, write_theta
from asyncrl.types import Segment

URLS = ["http://one:30000", "http://two:30000"]
PROBE = Probe(tokens=np.arange(4, dtype=np.int32))
RUNS = ("0000aaaa", "0000bbbb")


class Run:
    """One of the runs. Its version v has theta ``base + v / 100``."""

    def __init__(self, directory: Path, servers: dict[str, ScriptedServer], run: str, base: float, kind: str) -> None:
        self.base = base
        self.learner = ThetaLearner(lora_rank=8 if kind == "lora" else None)
        timeouts = Timeouts(outage_s=30)
        self.sampler = SGLang(list(servers), transport=network(servers), retries=8, timeouts=timeouts)
        writer = Writer(run=run)
        self.publisher: FullPublisher | LoraPublisher | RollingPublisher
        if kind == "lora":
            carrier = DiskAdapters(self.learner, directory)
            self.publisher = LoraPublisher(self.learner, self.sampler, carrier, "policy", probe=PROBE, writer=writer)
        else:
            make = FullPublisher if kind == "full" else RollingPublisher
            disk = DiskCarrier(self.learner, directory)
            self.publisher = make(self.learner, self.sampler, disk, probe=PROBE, writer=writer)

    async def publish(self, version: int) -> None:
        self.learner.theta = self.base + version / 100
        await self.publisher.stage(version)
        await self.publisher.publish(version)

    async def sample(self, version: int, key: str = "t") -> Segment:
        """A segment, each token of which is of the version that it says."""
        self.publisher.pin(version)
        ref = self.publisher.model_ref(version)
        request = SegmentRequest(
            trajectory_id=key,
            input_ids=np.arange(3, dtype=np.int32),
            max_new_tokens=4,
            version=version,
            adapter=ref.adapter,
            extra_key=ref.extra_key,
            replica=ref.replica,
        )
        try:
            segment = await self.sampler.sample(request)
        finally:
            self.publisher.unpin(version)
        for span in segment.versions:
            tokens = slice(span.start, span.end)
            expected = theta_logprobs(segment.tokens[tokens], self.base + span.version / 100)
            np.testing.assert_array_equal(segment.logprobs[tokens], expected)
        return segment

    async def live(self, versions: int, *, every_s: float) -> None:
        """Publish and sample."""
        async with self.sampler.opened():
            for version in range(versions):
                await self.publish(version)
                for number in range(4):
                    await self.sample(version, str(number))
                    await anyio.sleep(every_s / 4)


def _runs(directory: Path, kinds: tuple[str, str], servers: int) -> tuple[list[Run], dict[str, ScriptedServer]]:
    scripted = {url: ScriptedServer(seconds=lambda call: 0.3) for url in URLS[:servers]}
    runs = [
        Run(directory / name, scripted, name, base, kind)
        for name, base, kind in zip(RUNS, (0.0, 5.0), kinds, strict=True)
    ]
    return runs, scripted


async def _outcomes(*runs: Callable[[], Any]) -> list[Exception | None]:
    """How each ended, all at the same time."""
    ends: list[Exception | None] = [None] * len(runs)

    async def live(number: int) -> None:
        try:
            await runs[number]()
        except* (WeightsOverwritten, ServerUnavailable) as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            assert isinstance(first, Exception)
            ends[number] = first

    async with anyio.create_task_group() as tasks:
        for number in range(len(runs)):
            tasks.start_soon(live, number)
    return ends


@pytest.mark.virtual_clock
@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("full", "full"), ("rolling", "rolling"), ("full", "rolling")])
@pytest.mark.parametrize("every_s", [2.0, 10.0])
async def test_runs_that_write_to_the_same_servers_end_with_an_error_that_names_the_other(
    tmp_path: Path, kinds: tuple[str, str], every_s: float
) -> None:
    """No token of the other is taken for one's own; at least one run gives in, and the other may go on alone."""
    (one, two), _ = _runs(tmp_path, kinds, 2 if "rolling" in kinds else 1)
    ends = await _outcomes(lambda: one.live(30, every_s=every_s), lambda: two.live(30, every_s=every_s * 0.7))
    overwritten = [end for end in ends if isinstance(end, WeightsOverwritten)]
    assert overwritten
    assert any(f"weights of run {other}, version" in str(end) for end in overwritten for other in RUNS)
    assert anyio.current_time() < 600


@pytest.mark.virtual_clock
async def test_two_runs_of_adapters_share_servers(tmp_path: Path) -> None:
    """Under the same policy name, in the recipes' way: no adapter of one is unloaded by the other."""
    (one, two), servers = _runs(tmp_path, ("lora", "lora"), 2)
    assert await _outcomes(lambda: one.live(12, every_s=4), lambda: two.live(12, every_s=3)) == [None, None]
    for server in servers.values():
        for run in RUNS:
            assert any(name.startswith(f"policy-{run}-") for name in server.adapters)
        assert server.reloaded == []


@pytest.mark.virtual_clock
@pytest.mark.parametrize("matters", [True, False])
async def test_weights_that_change_below_an_adapter_are_noticed(tmp_path: Path, matters: bool) -> None:
    """Another run overwrites the base weights. If the adapter is another policy on them, its run ends and says why."""
    (one, two), servers = _runs(tmp_path, ("lora", "full"), 1)
    server = servers[URLS[0]]
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    write_theta(wrong, 9.0)

    async def adapters() -> None:
        async with one.sampler.opened():
            await one.publish(0)
            for _ in range(20):
                await one.sample(0)
                await anyio.sleep(1)

    async def weights() -> None:
        await anyio.sleep(10)
        async with two.sampler.opened():
            await two.publish(3)
        if matters:
            server.adapters = dict.fromkeys(server.adapters, wrong)

    ends = await _outcomes(adapters, weights)
    assert ends[1] is None
    if matters:
        assert isinstance(ends[0], ServerUnavailable)
        assert f"weights of run {RUNS[1]}, version 3" in str(ends[0])
    else:
        assert ends[0] is None


@pytest.mark.virtual_clock
@pytest.mark.parametrize("version", [8, 50, 10**9])
@pytest.mark.parametrize("where", ["weight_version", "weight_versions", "both"])
async def test_a_version_that_was_not_made_yet_is_asked_for_again(tmp_path: Path, version: int, where: str) -> None:
    """At max_staleness 0 too: tokens of version 50 at version 7 would be trained at age -43."""
    (one, _), servers = _runs(tmp_path, ("full", "full"), 1)
    server = servers[URLS[0]]

    def mislabel(reply: dict[str, Any]) -> None:
        meta, label = reply["meta_info"], one.sampler.labels.give(7).replace(":7", f":{version}")
        if where != "weight_versions":
            meta["weight_version"] = label
        if where == "weight_version":
            meta["weight_versions"] = None
        else:
            meta["weight_versions"][-1]["version"] = label

    async with one.sampler.opened():
        for published in range(8):
            await one.publish(published)
        server.fault("/generate", *[Fault(edit=mislabel)])
        segment = await one.sample(7)
    assert [span.version for span in segment.versions] == [7]
    assert len(server.generated) == 2


@pytest.mark.virtual_clock
@pytest.mark.parametrize("label", ["50", "default", "0000bbbb.11111111:1", "0000aaaa.11111111:1"])
async def test_a_server_that_says_other_weights_after_an_update_takes_no_request(tmp_path: Path, label: str) -> None:
    """Until an update was seen to arrive."""
    (one, _), servers = _runs(tmp_path, ("full", "full"), 2)
    async with one.sampler.opened():
        await one.publish(0)

        def mislabel(reply: dict[str, Any]) -> None:
            reply["weight_version"] = label

        servers[URLS[0]].fault("/model_info", Fault(edit=mislabel))
        await one.publish(1)
        assert [server.url for server in one.sampler.live] == [URLS[1]]
        await anyio.sleep(30)
        assert [server.url for server in one.sampler.live] == URLS


def test_a_run_keeps_its_name_where_it_is_resumed(tmp_path: Path) -> None:
    """A copy of its folder is another run, and so is a folder whose note cannot be read."""
    first = run_of(tmp_path / "a")
    assert run_of(tmp_path / "a") == first
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run-id").write_bytes((tmp_path / "a" / "run-id").read_bytes())
    assert run_of(tmp_path / "b") != first
    for content in (b"", b"\xff\xfe", b"short", b"g" * 32):
        (tmp_path / "a" / "run-id").write_bytes(content)
        again = run_of(tmp_path / "a")
        assert again != first and run_of(tmp_path / "a") == again


def test_a_folder_of_versions_has_one_run_at_a_time(tmp_path: Path) -> None:
    """Servers read it by name, and would get the weights of the other."""
    option = "policy.directory"
    with locked(tmp_path, option), pytest.raises(ConfigError, match=r"policy\.directory"), locked(tmp_path, option):
        pass
    with locked(tmp_path, option):
        pass
