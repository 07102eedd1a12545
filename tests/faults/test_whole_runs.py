"""Long runs in which much fails at once; and what is left of a run wherever it is stopped."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections import Counter
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

import asyncrl as rl
from asyncrl.events import BatchTaken, GroupDropped, GroupRerolled, MemberFailed, SegmentSampled
from asyncrl.rollout.tools import tool
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ScriptedSampler, run_virtual
from asyncrl.testing.server import Fault, GenerateCall, ScriptedServer
from asyncrl.types import Message, Row, Trajectory
from tests.faults.case import AGAIN, CALL, PROBE_TOKENS, Case, One, ServerCase, with_tool
from tests.scheduling.test_cancellation import SteppingClock, stop_when_it_strikes

pytestmark = pytest.mark.slow

SERVERS = ("http://one:30000", "http://two:30000", "http://three:30000")


def _flaky_tool(draw: random.Random, fates: Counter[str]) -> type[One]:
    """Of its calls one in ten fails and one in twenty never returns."""

    @tool(timeout=60.0)
    async def work() -> str:
        fate = draw.choices(["well", "fails", "hangs"], [0.85, 0.10, 0.05])[0]
        fates[fate] += 1
        await anyio.sleep(draw.expovariate(1.0))
        if fate == "fails":
            raise rl.InfrastructureError("the sandbox is gone")
        if fate == "hangs":
            await anyio.Event().wait()
        return "done"

    return with_tool(work)


@pytest.mark.usefixtures("threads_in_place")
def test_two_thousand_trajectories_with_failures_of_every_kind(tmp_path: Path) -> None:
    """10 % tool failures, 5 % hangs, two server deaths, a failed publication: it ends with the right counts."""
    draw, fates = random.Random(0), Counter[str]()

    def seconds(call: GenerateCall) -> float:
        return 0.05 if len(call.input_ids) == PROBE_TOKENS else draw.expovariate(1.0)

    def tokens(call: GenerateCall) -> list[int]:
        return [*(b"ok" if bytes(i % 256 for i in call.input_ids).find(CALL) >= 0 else CALL), END]

    servers = {url: ScriptedServer(tokens=tokens, seconds=seconds) for url in SERVERS}
    case = ServerCase(
        tmp_path,
        servers,
        _flaky_tool(draw, fates),
        retries=10,
        max_staleness=2,
        groups_per_step=8,
        group_size=8,
        engine={"failures": rl.Failures(member_retries=2), "schedule": rl.Schedule(concurrency=192)},
    )

    async def trouble() -> None:
        await anyio.sleep(200)
        for url in SERVERS[1:]:
            servers[url].down = True
            await anyio.sleep(120)
            servers[url].restart()
            servers[url].down = False
            await anyio.sleep(120)
        servers[SERVERS[0]].fault("/load_lora_adapter", Fault(status=500))

    run = case._run

    async def both(steps: int, rows: int) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trouble)
            await run(steps, rows)
            tasks.cancel_scope.cancel()

    case._run = both  # type: ignore[method-assign]
    case.play(32, rows=500, seed=0)

    assert len(case.steps) == 32
    totals = case.audit.ledger.totals
    assert totals.consumed == 256
    assert totals.trained_members == 2048
    assert totals.admitted == 256 + totals.dropped.total()
    assert totals.dropped == Counter(failed=len(case.of(GroupDropped)))
    assert totals.failed_attempts == len(case.of(MemberFailed))
    assert totals.rerolled == len(case.of(GroupRerolled))
    assert totals.failed_attempts <= fates["fails"] + fates["hangs"]
    assert fates["fails"] > 150
    assert fates["hangs"] > 60
    assert sum("Server" in event.error for event in case.of(MemberFailed)) == 0
    quarantined = {notice["url"] for notice in case.notices("server_quarantined")}
    assert quarantined >= set(SERVERS[1:])
    assert all(step.metrics["staleness/span_age_max"] <= 2 for step in case.steps)
    taken = Counter(group for event in case.of(BatchTaken) for group in event.groups)
    assert set(taken.values()) == {1}
    case.assert_exactly_once()


def _drained(trajectories: int) -> int:
    """Bytes that are left of a run of so many trajectories, of 4,000 tokens each and one in ten failing."""
    tracemalloc.start()
    try:
        _play(trajectories)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _play(trajectories: int) -> None:
    calls = Counter[str]()

    class Flaky(One):
        open = 0

        async def reward(self, traj: Trajectory, row: Row) -> float:
            calls["reward"] += 1
            if calls["reward"] % 10 == 0:
                raise rl.InfrastructureError("now and then")
            return float(traj.member)

    case = Case(
        Flaky,
        sampler=_Forgetful(seconds=lambda request: 1.0, tokens=lambda request: [65] * 3999 + [END]),
        max_staleness=2,
        groups_per_step=4,
        group_size=4,
        engine={"failures": rl.Failures(member_retries=3)},
    )
    case.bus._observers.clear()
    learner: Any = case.learner

    async def main() -> None:
        async for step in case.start(trajectories // 16, 10):
            assert step.metrics["ledger/open_rows"] <= 12
            learner.batches.clear()
            case.sampler.requests.clear()
            case.sampler.segments.clear()

    run_virtual(main)


class _Forgetful(ScriptedSampler):
    """What it served is cleared after each step."""


def test_memory_is_flat_after_a_run_is_drained() -> None:
    """Ten times the trajectories leave no more behind, whatever failed in between."""
    _drained(80)  # caches and the like
    small, large = _drained(80), _drained(800)
    assert large - small < 128 * 1024


# cancelled at every await


def _shape(**options: Any) -> dict[str, Any]:
    return {"groups_per_step": 1, "group_size": 2, "max_staleness": 1, **options}


class _Troubled(One):
    """Row 0 fails for good, row 1 once; the tool of row 2 hangs until its deadline. Closing takes an await."""

    open = 0
    failures: ClassVar[Counter[int]] = Counter()

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        await anyio.sleep(0.3)
        kind = traj.row
        if traj.member == 0 and (kind == 0 or (kind == 1 and not self.failures[1])):
            self.failures[kind] += 1
            raise rl.InfrastructureError("the sandbox is gone")
        if kind == 2 and traj.member == 1 and not self.failures[2]:
            self.failures[2] += 1
            await anyio.Event().wait()
        return None

    async def close(self) -> None:
        await anyio.sleep(0.1)
        await super().close()


def _stop_at(at: int, way: Any) -> bool:
    """Stop a run with failures before its ``at``-th pass and look at what is left; False if it ended before."""
    _Troubled.open = 0
    _Troubled.failures = Counter()
    case = Case(
        _Troubled,
        sampler=ScriptedSampler(seconds=lambda request: 0.5),
        engine={
            "failures": rl.Failures(consecutive=100, retry_delay=0.2),
            "environment_timeout": 3.0,
            "trajectory_timeout": 20.0,
            "schedule": rl.Schedule(concurrency=3, max_sample_requests=2),
        },
        **_shape(),
    )

    async def main() -> bool:
        return await stop_when_it_strikes(lambda: case.start(3, 6), case.steps, way)

    with case.audited() as slots:
        stopped = anyio.run(main, backend_options={"loop_factory": partial(SteppingClock, at)})
        case.assert_nothing_is_held(slots)
        open_rows = case.audit.ledger.close()
    assert _Troubled.open == 0
    assert len(case.steps) == 3 or stopped
    totals = case.audit.ledger.totals
    assert totals.admitted == totals.consumed + totals.dropped.total()
    assert totals.dropped["run_ended"] == open_rows
    if not stopped:
        assert (open_rows, totals.consumed, totals.dropped["failed"]) == (0, 3, 1)
    return stopped


@pytest.mark.parametrize(("way", "stride"), [("cancel the scope", 1), ("cancel the task", 3), ("leave the loop", 3)])
def test_a_run_with_failures_can_be_stopped_at_every_await(way: Any, stride: int) -> None:
    """In retries, rerolls, drops, deadlines, close(): nothing is held, each row has its fate.

    Other ways than the first end in the same cancellation, so a part of the awaits does for them.
    """
    at = 1
    while _stop_at(at, way):
        at += stride
    assert at > 150


@pytest.mark.usefixtures("threads_in_place")
@pytest.mark.parametrize("seconds", [0.5 + 0.71 * k for k in range(24)])
def test_a_cancelled_run_leaves_no_request_on_any_server(tmp_path: Path, seconds: float) -> None:
    """Whatever it was doing; adapters that nobody uses are gone too, but for the newest."""
    servers = {
        url: ScriptedServer(
            tokens=lambda call: [65, END], seconds=lambda call: 0.1 if len(call.input_ids) == PROBE_TOKENS else 2.0
        )
        for url in SERVERS[:2]
    }
    One.open = 0
    case = ServerCase(tmp_path, servers, max_staleness=1, engine={"failures": AGAIN})

    async def main(steps: int, rows: int) -> None:
        with anyio.move_on_after(seconds):
            async with aclosing(case.start(steps, rows)) as run:
                async for step in run:
                    case.steps.append(step)
        for server in servers.values():
            assert server.in_flight == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    case._run = main  # type: ignore[method-assign]
    case.play(1000)
    assert One.open == 0
    assert all(len(server.adapters) <= 3 for server in servers.values())
    assert all(isinstance(event, SegmentSampled) for event in case.of(SegmentSampled))


def test_requests_of_a_cut_off_member_are_counted_as_asked_once() -> None:
    """A trajectory's id never has two requests at a time."""
    busy: Counter[str] = Counter()

    class Watching(ScriptedSampler):
        async def sample(self, request: SegmentRequest) -> Any:
            busy[request.trajectory_id] += 1
            assert busy[request.trajectory_id] == 1
            try:
                return await super().sample(request)
            finally:
                busy[request.trajectory_id] -= 1

    _Troubled.open, _Troubled.failures = 0, Counter()
    case = Case(
        _Troubled,
        sampler=Watching(seconds=lambda request: 0.5),
        engine={"failures": AGAIN, "environment_timeout": 3.0},
        **_shape(),
    )
    case.play(5, rows=6)
    case.assert_exactly_once()
