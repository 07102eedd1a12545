"""Publishing adapters, against scripted servers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest

from asyncrl.errors import ConfigError, ProbeMismatch, PublicationError, StalenessError
from asyncrl.events import Event, Notice
from asyncrl.files import seal_folder
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher, TensorAdapters
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.labels import Writer
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.server import Fault, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, theta_logprobs, write_theta
from asyncrl.types import Segment

URL, OTHER = "http://one:30000", "http://two:30000"
PROBE = Probe(tokens=np.arange(8, dtype=np.int32))


class Run:
    """A learner, servers and the publisher between them."""

    def __init__(self, directory: Path, servers: dict[str, ScriptedServer], writer: Writer | None = None) -> None:
        self.directory = directory
        self.learner = ThetaLearner()
        self.sampler = SGLang(list(servers), transport=network(servers))
        self.publisher = LoraPublisher(
            self.learner, self.sampler, DiskAdapters(self.learner, directory), "run", probe=PROBE, writer=writer
        )
        self.notices: list[str] = []
        self.reasons: list[str] = []
        self.sampler.events.subscribe(self._note, kinds=(Notice,))
        self.changed = anyio.Event()

    def _note(self, event: Event) -> None:
        assert isinstance(event, Notice)
        self.notices.append(event.name)
        self.reasons.append(str(event.keys.get("reason")))

    async def publish(self, *versions: int) -> None:
        for version in versions:
            self.learner.theta = version / 10
            await self.publisher.stage(version)
            await self.publisher.publish(version)

    async def sample(self, version: int, key: str = "t") -> Segment:
        ref = self.publisher.model_ref(version)
        request = SegmentRequest(
            trajectory_id=key,
            input_ids=np.arange(3, dtype=np.int32),
            max_new_tokens=2,
            version=version,
            adapter=ref.adapter,
            extra_key=ref.extra_key,
        )
        return await self.sampler.sample(request)

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@asynccontextmanager
async def _running(
    directory: Path, *servers: ScriptedServer, writer: Writer | None = None
) -> AsyncGenerator[Run, None]:
    run = Run(directory, dict(zip((URL, OTHER), servers, strict=False)), writer)
    async with run.sampler.opened():
        yield run


def _versions(server: ScriptedServer) -> list[int]:
    return sorted(int(name.rsplit("-v", 1)[1]) for name in server.adapters)


async def test_each_version_is_a_folder_and_an_adapter_of_its_own(tmp_path: Path) -> None:
    """Both of two versions can be asked for, and each answers with its own weights."""
    one = ScriptedServer()
    async with _running(tmp_path, one) as run:
        await run.publish(0, 1)
        for version in (0, 1):
            segment = await run.sample(version)
            assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, version / 10))
            assert [span.version for span in segment.versions] == [version]
        assert run.folders() == ["v000000", "v000001"]
        assert [call.extra_key for call in one.generated] == ["v0", "v1"]
        assert all(":" not in name for name in one.adapters)


async def test_fifty_versions_leave_two_adapters_and_two_folders(tmp_path: Path) -> None:
    """Nothing piles up on the servers or on the disk."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        for version in range(50):
            await run.publish(version)
            assert len(one.adapters) <= 4
        await one.wait_until(lambda: len(one.adapters) == 2)
        await two.wait_until(lambda: len(two.adapters) == 2)
        assert _versions(one) == _versions(two) == [48, 49]
    assert len(run.folders()) <= 3  # the last removal may have been overtaken by the end of the run


async def test_a_pinned_version_stays_until_its_last_pin_is_gone(tmp_path: Path) -> None:
    """Versions are counted out, not aged out; once unpinned the adapter and then its folder go."""
    one = ScriptedServer()
    async with _running(tmp_path, one) as run:
        await run.publish(0)
        run.publisher.pin(0)
        run.publisher.pin(0)
        await run.publish(1, 2, 3, 4)
        run.publisher.unpin(0)
        await one.wait_until(lambda: _versions(one) == [0, 3, 4])
        assert (await run.sample(0)).versions[0].version == 0
        assert one.reloaded == []
        assert "v000000" in run.folders()
        run.publisher.unpin(0)
        await one.wait_until(lambda: _versions(one) == [3, 4])
        with pytest.raises(StalenessError, match="version 0 is not loaded"):
            run.publisher.model_ref(0)


async def test_a_version_is_not_served_before_it_is_published(tmp_path: Path) -> None:
    """Staging alone names nothing."""
    async with _running(tmp_path, ScriptedServer()) as run:
        await run.publisher.stage(0)
        with pytest.raises(StalenessError, match="version 0"):
            run.publisher.model_ref(0)


async def test_a_folder_is_never_removed_before_the_server_let_go_of_it(tmp_path: Path) -> None:
    """While an unload is not answered, publication goes on and the folder stays; then it goes."""
    one = ScriptedServer()
    one.fault("/unload_lora_adapter", Fault(hold=True))
    async with _running(tmp_path, one) as run:
        await run.publish(0, 1, 2)
        await one.wait_until(lambda: any(route == "/unload_lora_adapter" for route, _ in one.calls))
        await run.publish(3)
        assert "v000000" in run.folders()
        one.release()
        await one.wait_until(lambda: _versions(one) == [2, 3])


def _refuse(reply: dict[str, object]) -> None:
    reply["success"] = False
    reply["error_message"] = "no memory"


@pytest.mark.virtual_clock
@pytest.mark.parametrize("fault", [Fault(status=500), Fault(ignore=True, edit=_refuse)])
async def test_a_failed_unload_is_reported_and_tried_again(tmp_path: Path, fault: Fault) -> None:
    """It is not fatal, and the folder stays until the adapter is gone."""
    one = ScriptedServer()
    one.fault("/unload_lora_adapter", fault)
    async with _running(tmp_path, one) as run:
        await run.publish(0, 1, 2)
        await one.wait_until(lambda: "adapter_not_unloaded" in run.notices)
        assert "v000000" in run.folders()
        await anyio.sleep(10)
        assert _versions(one) == [1, 2]
        assert run.folders() == ["v000001", "v000002"]


async def test_adapters_of_an_earlier_process_of_the_run_are_swept(tmp_path: Path) -> None:
    """Left-overs go; adapters of other runs and of nobody stay, also if their name begins in the same way."""
    one = ScriptedServer()
    write_theta(tmp_path, 0.0)
    run_id = "0123abcd"
    others = {f"run-other-{run_id}-00000000-v1", f"runner-{run_id}-00000000-v1", "run-0123abce-00000000-v7", "mine"}
    one.adapters = dict.fromkeys({f"run-{run_id}-00000000-v7", *others}, tmp_path)
    async with _running(tmp_path / "published", one, writer=Writer(run=run_id)) as run:
        await run.publish(0)
        await one.wait_until(lambda: f"run-{run_id}-00000000-v7" not in one.adapters)
        assert others < set(one.adapters)


async def test_an_adapter_that_the_server_does_not_use_stops_the_run(tmp_path: Path) -> None:
    """The server takes the adapter and answers with the base weights: the probe sees it."""
    async with _running(tmp_path, ScriptedServer(), ScriptedServer(ignores_adapters=True)) as run:
        await run.publish(0)
        with pytest.raises(ProbeMismatch, match="http://two:30000 does not hold version 1"):
            await run.publish(1)


async def test_the_reference_is_the_staged_version_and_not_the_learner_of_later(tmp_path: Path) -> None:
    """The learner has moved on when a version is published."""
    async with _running(tmp_path, ScriptedServer()) as run:
        await run.publisher.stage(0)
        run.learner.theta = 5.0
        assert await run.publisher.publish(0) == 0.0


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    "fault", [Fault(status=500), Fault(status=400), Fault(drop=True), Fault(ignore=True, edit=_refuse)]
)
async def test_a_server_that_does_not_take_a_version_is_quarantined(tmp_path: Path, fault: Fault) -> None:
    """The others have it, requests go there, and the server comes back with the version."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        one.fault("/load_lora_adapter", fault)
        await run.publish(1)
        assert [server.url for server in run.sampler.live] == [OTHER]
        assert {(await run.sample(1, str(key))).server for key in range(8)} == {OTHER}
        await anyio.sleep(10)
        assert _versions(one) == [0, 1]
        assert run.notices == ["server_quarantined", "server_returned"]
        assert {(await run.sample(1, str(key))).server for key in range(8)} == {URL, OTHER}


@pytest.mark.virtual_clock
async def test_a_server_that_hangs_in_a_load_holds_the_publication_for_a_bounded_time(tmp_path: Path) -> None:
    """At the deadline it is quarantined, and the version is live on the others."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        one.fault("/load_lora_adapter", Fault(hold=True))
        await run.publish(0)
        assert anyio.current_time() == run.sampler.timeouts.publication_s
        assert [server.url for server in run.sampler.live] == [OTHER]


@pytest.mark.virtual_clock
async def test_a_load_whose_answer_was_lost_counts_once_it_is_there(tmp_path: Path) -> None:
    """The second attempt finds the adapter loaded, and does not fail because its name is in use."""
    one = ScriptedServer()
    async with _running(tmp_path, one) as run:
        one.fault("/load_lora_adapter", Fault(lose=True))
        await run.publish(0)
        assert (await run.sample(0)).server == URL


@pytest.mark.virtual_clock
async def test_without_a_server_left_publication_fails_with_the_reason(tmp_path: Path) -> None:
    """The run must stop, and say why no server has the version."""
    one = ScriptedServer()
    async with _running(tmp_path, one) as run:
        one.fault("/load_lora_adapter", *[Fault(status=500, body=b'{"error":{"message":"disk full"}}')] * 99)
        with pytest.raises(PublicationError, match=r"no server took version 0.*disk full"):
            await run.publish(0)


@pytest.mark.virtual_clock
async def test_a_restarted_server_gets_all_versions_in_use_before_its_next_request(tmp_path: Path) -> None:
    """It forgot everything; the request that finds out is answered all the same, by the right weights."""
    one = ScriptedServer()
    async with _running(tmp_path, one) as run:
        await run.publish(0)
        run.publisher.pin(0)
        await run.publish(1, 2, 3)
        one.restart()
        segment = await run.sample(3)
        assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, 0.3))
        assert _versions(one) == [0, 2, 3]


@pytest.mark.virtual_clock
async def test_a_version_published_while_a_server_is_restored_is_not_missed(tmp_path: Path) -> None:
    """The server takes no request before it holds what is newest at that moment."""
    one, two = ScriptedServer(), ScriptedServer()
    async with _running(tmp_path, one, two) as run:
        await run.publish(0)
        one.restart()
        one.fault("/load_lora_adapter", Fault(hold=True))
        run.sampler.suspect(URL, "test")
        await one.wait_until(lambda: sum(route == "/load_lora_adapter" for route, _ in one.calls) == 2)
        await run.publish(1)
        assert [server.url for server in run.sampler.live] == [OTHER]
        held: list[list[int]] = []
        run.sampler.events.subscribe(lambda event: held.append(_versions(one)))
        one.release()
        await anyio.sleep(1)
        assert held == [[0, 1]]


@pytest.mark.parametrize("name", ["a:b", "", "a b", "../a"])
async def test_names_that_servers_or_paths_misread_are_refused(tmp_path: Path, name: str) -> None:
    """A colon, for one, separates base model and adapter on some routes."""
    learner, sampler = ThetaLearner(), SGLang([URL])
    with pytest.raises(ConfigError, match=r"policy\.name"):
        LoraPublisher(learner, sampler, DiskAdapters(learner, tmp_path), name, probe=PROBE)


@asynccontextmanager
async def _with_tensors(directory: Path, *servers: ScriptedServer) -> AsyncGenerator[Run, None]:
    """As ``_running``, with adapters that travel in requests."""
    run = Run(directory, dict(zip((URL, OTHER), servers, strict=False)))
    run.publisher = LoraPublisher(run.learner, run.sampler, TensorAdapters(run.learner), "run", probe=PROBE)
    async with run.sampler.opened():
        yield run


async def test_adapters_travel_in_requests_without_a_folder(tmp_path: Path) -> None:
    """With the configuration, and a payload for each tensor-parallel rank; each version answers as itself."""
    one = ScriptedServer()
    one.fault("/server_info", *[Fault(edit=lambda reply: reply.update(tp_size=2))] * 9)
    async with _with_tensors(tmp_path, one) as run:
        await run.publish(0, 1)
        for version in (0, 1):
            segment = await run.sample(version)
            assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, version / 10))
    bodies = [body for route, body in one.calls if route == "/load_lora_adapter_from_tensors"]
    assert [len(body["serialized_named_tensors"]) for body in bodies] == [2, 2]
    assert all(body["config_dict"] == {"peft_type": "LORA", "r": 8} for body in bodies)
    assert run.folders() == []


async def test_an_adapter_without_a_folder_is_counted_out_too(tmp_path: Path) -> None:
    """No server could bring it back, so it stays while it is pinned, and no late request names it."""
    one = ScriptedServer()
    async with _with_tensors(tmp_path, one) as run:
        await run.publish(0)
        run.publisher.pin(0)
        await run.publish(1, 2, 3)
        await one.wait_until(lambda: _versions(one) == [0, 2, 3])
        assert (await run.sample(0)).versions[0].version == 0
        run.publisher.unpin(0)
        await one.wait_until(lambda: _versions(one) == [2, 3])
        assert one.reloaded == []


@pytest.mark.virtual_clock
async def test_a_restarted_server_gets_adapters_from_the_staged_copies(tmp_path: Path) -> None:
    """All that are in use, with the values that they had, though the learner has moved on."""
    one = ScriptedServer()
    async with _with_tensors(tmp_path, one) as run:
        await run.publish(0)
        run.publisher.pin(0)
        await run.publish(1, 2, 3)
        run.learner.theta = 9.0
        one.restart()
        for version in (3, 0):
            segment = await run.sample(version)
            assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, version / 10))
        assert _versions(one) == [0, 2, 3]


@pytest.mark.slow
@pytest.mark.virtual_clock
@pytest.mark.parametrize("open_run", [_running, _with_tensors])
async def test_fifty_versions_under_load_stay_within_the_window(
    tmp_path: Path, open_run: Callable[..., AbstractAsyncContextManager[Run]]
) -> None:
    """Trajectories pin their versions while others are published: none is missing, and only what is needed is there.

    The window is the two newest, those that somebody has pinned, and one that is just being unloaded.
    """
    draw = random.Random(0)
    one, two = (ScriptedServer(seconds=lambda call: 0.5 + draw.randrange(7)) for _ in range(2))
    holders: Counter[int] = Counter()
    answered = 0
    newest = 0

    async def trajectory(run: Run, key: str) -> None:
        nonlocal answered
        while True:
            version = newest
            run.publisher.pin(version)
            holders[version] += 1
            for _ in range(3):
                segment = await run.sample(version, key)
                assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, version / 10))
                answered += 1
            run.publisher.unpin(version)
            holders[version] -= 1

    async with open_run(tmp_path, one, two) as run, anyio.create_task_group() as tasks:
        await run.publish(0)
        for number in range(16):
            tasks.start_soon(trajectory, run, str(number))
        for newest_now in range(1, 50):
            await anyio.sleep(4)
            await run.publish(newest_now)
            newest = newest_now
            window = len({newest, newest - 1} | {version for version, count in holders.items() if count}) + 2
            assert len(one.adapters) <= window and len(two.adapters) <= window
            assert len(run.folders()) <= window
        tasks.cancel_scope.cancel()
    assert answered > 500
    assert one.reloaded == two.reloaded == []
    assert run.notices == []


async def test_held_versions_come_back_with_another_process(tmp_path: Path) -> None:
    """What a killed process has left on disk is loaded again under new names; what nobody needs of it is removed."""
    async with _running(tmp_path, ScriptedServer()) as run:
        await run.publish(0)
        run.publisher.pin(0)
        await run.publish(1, 2, 3)
    one = ScriptedServer()
    async with _running(tmp_path, one) as run:
        assert await run.publisher.adopt({0, 7}) == {0}
        assert run.folders() == ["v000000"]
        run.publisher.pin(0)
        await run.publish(3)
        assert _versions(one) == [0, 3]
        segment = await run.sample(0)
        assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, 0.0))
        await run.publish(4)
        run.publisher.unpin(0)
        await one.wait_until(lambda: _versions(one) == [3, 4])


@pytest.mark.virtual_clock
@pytest.mark.parametrize("held", [0, 1, 2, 4])
async def test_a_returning_server_must_be_right_about_every_version(tmp_path: Path, held: int) -> None:
    """Not only about the newest: one that applies an older adapter wrongly takes no request until it is right."""
    one, two = ScriptedServer(), ScriptedServer()
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    write_theta(wrong, held / 10 + 0.5)
    async with _running(tmp_path / "published", one, two) as run:
        for version in range(5):
            await run.publish(version)
            run.publisher.pin(version)
        name = next(name for name in one.adapters if name.endswith(f"-v{held}"))
        one.restart()

        def spoil(reply: dict[str, object]) -> None:
            if name in one.adapters:
                one.adapters = {**one.adapters, name: wrong}

        one.fault("/load_lora_adapter", *[Fault(edit=spoil)] * 5)
        run.sampler.suspect(URL, "it looks new")
        await anyio.sleep(20)
        assert [server.url for server in run.sampler.live] == [OTHER]
        segment = await run.sample(held)
        assert np.array_equal(segment.logprobs, theta_logprobs(segment.tokens, held / 10))
        one.restart()
        await anyio.sleep(100)
        assert [server.url for server in run.sampler.live] == [URL, OTHER]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("harm", ["none", "weights", "reference"])
async def test_versions_of_an_earlier_process_are_compared_with_what_it_has_noted(tmp_path: Path, harm: str) -> None:
    """A folder that has changed is found out; without the note nothing can be said, and that is said."""
    async with _running(tmp_path, ScriptedServer()) as run:
        await run.publish(0)
        run.publisher.pin(0)
        await run.publish(1, 2, 3)
    folder = tmp_path / "v000000"
    if harm == "weights":
        write_theta(folder, 0.5)
    if harm == "reference":
        (folder / "probe.json").write_text("[[")
    # Not damage, which the folder would tell, but what somebody has written on purpose.
    (folder / "about.json").unlink()
    seal_folder(folder, "about.json", {})
    one = ScriptedServer()
    async with _running(tmp_path, one) as run:
        assert await run.publisher.adopt({0}) == {0}
        assert ("version_not_checked" in run.notices) is (harm == "reference")
        run.publisher.pin(0)
        if harm == "weights":
            with pytest.raises(ProbeMismatch, match="does not hold version 0"):
                await run.publish(3)
            return
        await run.publish(3)
        assert _versions(one) == [0, 3]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("harm", ["a bit", "a cut", "a file less", "no seal", "a folder for a file"])
@pytest.mark.parametrize("name", ["theta.json", "probe.json", "about.json"])
async def test_a_damaged_version_of_an_earlier_process_is_not_adopted(tmp_path: Path, harm: str, name: str) -> None:
    """Its trajectories begin anew, as if it were gone, and a notice has the path."""
    async with _running(tmp_path, ScriptedServer()) as run:
        await run.publish(0)
        run.publisher.pin(0)
        await run.publish(1)
        run.publisher.pin(1)
        await run.publish(2, 3)
    path = tmp_path / "v000000" / ("about.json" if harm == "no seal" else name)
    content = path.read_bytes()
    place = len(content) // 2
    path.unlink()
    if harm == "a bit":
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif harm == "a cut":
        path.write_bytes(content[:place])
    elif harm == "a folder for a file":
        path.mkdir()
    async with _running(tmp_path, ScriptedServer()) as run:
        assert await run.publisher.adopt({0, 1}) == {1}
        assert run.folders() == ["v000001"]
        assert run.notices == ["adapter_damaged"]
        assert str(path) in run.reasons[0]


@pytest.mark.virtual_clock
async def test_a_server_returns_though_versions_come_as_fast_as_they_are_installed(tmp_path: Path) -> None:
    """It takes part in the next delivery, instead of always being one version behind."""
    one, two = ScriptedServer(seconds=lambda call: 10), ScriptedServer(seconds=lambda call: 10)
    async with _running(tmp_path, one, two) as run:
        await run.publish(0, 1)
        two.down = True
        run.sampler.quarantine(OTHER, "it died")
        await run.publish(2)
        two.restart()
        two.down = False
        await anyio.sleep(3)
        await run.publish(3, 4, 5, 6, 7, 8)
        assert len(run.sampler.live) == 2
        assert _versions(two)[-1] == 8
