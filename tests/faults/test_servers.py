"""What becomes of failures of sampling servers and publication, in whole runs on scripted SGLang servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import asyncrl as rl
from asyncrl.concurrency.endings import first_error
from asyncrl.errors import PublicationError, RequestRefused, SamplingError, ServerUnavailable
from asyncrl.events import MemberFailed, VersionPublished
from asyncrl.testing import END
from asyncrl.testing.server import Fault, GenerateCall, ScriptedServer
from tests.faults.case import PROBE_TOKENS, One, ServerCase

pytestmark = pytest.mark.usefixtures("threads_in_place")

ONE, TWO = "http://one:30000", "http://two:30000"


def _server(seconds: float | Callable[[GenerateCall], float] = 1.0) -> ScriptedServer:
    """Answers "abc" and the stop token; probes at once."""

    def duration(call: GenerateCall) -> float:
        if len(call.input_ids) == PROBE_TOKENS:
            return 0.1
        return seconds(call) if callable(seconds) else seconds

    return ScriptedServer(tokens=lambda call: [65, 66, 67, END], seconds=duration)


def _case(directory: Path, *servers: ScriptedServer, **options: Any) -> ServerCase:
    One.open = 0
    return ServerCase(directory, dict(zip((ONE, TWO), servers, strict=False)), **{"max_staleness": 1, **options})


# sampling request: 503, connect error, no byte read: retried with a new rid, the old one aborted; 4xx is final


@pytest.mark.parametrize(
    "fault",
    [Fault(status=503), Fault(status=500), Fault(drop=True), Fault(lose=True)],
    ids=["503", "500", "cut", "lost"],
)
def test_a_request_that_fails_is_asked_again_with_a_new_rid(tmp_path: Path, fault: Fault) -> None:
    """No member notices, and no rid is used twice."""
    first, second = _server(), _server()
    case = _case(tmp_path, first, second)
    first.fault("/generate", *[Fault()] * 2, fault)  # two probes and requests are well
    case.play(3)
    assert case.of(MemberFailed) == []
    rids = Counter(call.rid for server in (first, second) for call in server.generated)
    assert set(rids.values()) == {1}
    assert len(case.steps) == 3
    case.assert_exactly_once()


def test_a_server_that_only_fails_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    """500 for ever on the only server: the attempts end, and so does the run."""
    server = _server()
    case = _case(tmp_path, server, retries=1)
    server.fault("/generate", Fault(), *[Fault(status=500, body=b'{"error":{"message":"CUDA error"}}')] * 1000)
    with pytest.raises(SamplingError, match="CUDA error"):
        case.play(3)
    assert One.open == 0


def test_a_refusal_is_final_and_ends_the_run_with_the_servers_words(tmp_path: Path) -> None:
    """Each attempt of a member asks once; the error has the body's text."""
    server = _server()
    case = _case(tmp_path, server, engine={"failures": rl.Failures(consecutive=2, retry_delay=0.0)})
    server.fault("/generate", Fault(), *[Fault(status=400, body=b'{"error":{"message":"input too long"}}')] * 1000)
    with pytest.raises(RequestRefused, match="input too long"):
        case.play(3)
    assert One.open == 0


# a server dies: its requests move to others from the tokens they have; quarantined until it serves the current version


def test_the_requests_of_a_server_that_dies_move_to_others(tmp_path: Path) -> None:
    """It dies in the middle of the run and comes back with base weights: every row is trained, by the right version."""
    lasting, mortal = _server(10.0), _server(10.0)
    case = _case(tmp_path, lasting, mortal)

    before: list[int] = []

    async def die(seconds: float) -> None:
        await anyio.sleep(seconds)
        mortal.down = True
        await anyio.sleep(100)
        before.append(len(mortal.generated))
        mortal.restart()
        mortal.down = False

    _with(case, die, 15.0, steps=40)
    assert [traj.error for step in case.steps for traj in step.trajectories if traj.error is not None] == []
    assert case.of(MemberFailed) == []
    assert case.notices("server_quarantined")
    assert case.notices("server_returned")
    used = {call.lora_path for call in mortal.generated}
    assert None not in used
    assert len(mortal.generated) > before[0] > 0
    for step in case.steps:
        assert 0 <= step.metrics["staleness/span_age_max"] <= 1
    case.assert_exactly_once()


def _with(case: ServerCase, beside: Callable[..., Any], *args: Any, steps: int) -> None:
    """Take the steps while something else happens."""
    original = case._run

    async def run(steps: int, rows: int) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(beside, *args)
                await original(steps, rows)
                tasks.cancel_scope.cancel()
        except ExceptionGroup as group:
            failure = first_error(group)
        else:
            return
        raise failure

    case._run = run  # type: ignore[method-assign]
    case.play(steps)


def test_without_any_server_the_run_ends_and_says_so(tmp_path: Path) -> None:
    """It waits for one to return for a bounded time, not in silence for ever."""
    server = _server()
    case = _case(tmp_path, server, engine={"failures": rl.Failures(consecutive=2)})

    async def die() -> None:
        await anyio.sleep(3)
        server.down = True

    with pytest.raises((ServerUnavailable, PublicationError)):
        _with(case, die, steps=100)


# publication fails or hangs on some server: not advanced for it; quarantine; bounded retries; stops if none is left


@pytest.mark.parametrize(
    "fault",
    [Fault(status=500), Fault(hold=True), Fault(lose=True), Fault(ignore=True)],
    ids=["500", "hang", "lost", "lies"],
)
def test_a_publication_that_fails_on_one_server_goes_on_with_the_others(tmp_path: Path, fault: Fault) -> None:
    """The server is out until it holds what is in use; no request of a version meets a server without it."""
    good, bad = _server(), _server()
    case = _case(tmp_path, good, bad)
    bad.fault("/load_lora_adapter", Fault(), fault)
    case.play(20)
    assert [event.version for event in case.of(VersionPublished)] == list(range(21))
    assert case.of(MemberFailed) == []
    assert len(case.steps) == 20
    case.assert_exactly_once()


def test_a_publication_that_fails_everywhere_stops_the_run(tmp_path: Path) -> None:
    """The version is not advanced: nobody sampled with it."""
    server = _server()
    case = _case(tmp_path, server)
    server.fault("/load_lora_adapter", Fault(), *[Fault(status=500)] * 1000)
    with pytest.raises(PublicationError):
        case.play(10)
    assert {call.lora_path for call in server.generated} == {server.generated[0].lora_path}
    assert [event.version for event in case.of(VersionPublished)] == [0]


# staleness accounting


def test_a_version_that_is_published_while_a_request_is_held_does_not_make_it_younger(tmp_path: Path) -> None:
    """The segment says the version of its dispatch."""
    server = _server(lambda call: 50.0 if call.input_ids == (ord("1"),) else 1.0)
    case = _case(tmp_path, server, max_staleness=2, engine={"schedule": rl.Schedule(admit_ahead=2)})
    case.play(6, rows=100)
    held = [traj for step in case.steps for traj in step.trajectories if traj.row == 1]
    assert len(held) == 2
    assert {span.version for traj in held for span in traj.spans if span.version is not None} == {0}
    paths = {call.lora_path for call in server.generated if call.input_ids == (ord("1"),)}
    assert paths == {server.generated[0].lora_path}
    assert max(step.metrics["staleness/span_age_max"] for step in case.steps) == 2


def test_no_group_is_of_a_version_that_is_still_being_loaded(tmp_path: Path) -> None:
    """Loads take a hundred seconds; until the last server has acknowledged, requests name the version before it."""
    servers = _server(), _server()
    case = _case(tmp_path, *servers)
    published: list[float] = []
    for server in servers:
        server.fault("/load_lora_adapter", Fault(), *[Fault(hold=True)])

    async def acknowledge() -> None:
        for server in servers:
            await anyio.sleep(10)
            published.append(anyio.current_time())
            server.release()

    _with(case, acknowledge, steps=4)
    versions = {event.version: event.time for event in case.of(VersionPublished)}
    assert versions[1] >= 20.0
    for step in case.steps:
        for traj in step.trajectories:
            assert traj.version is not None
    case.assert_exactly_once()
