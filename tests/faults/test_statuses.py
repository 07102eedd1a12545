"""What a refused request costs: its member and nothing else, whatever the status between 400 and 499."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.events import GroupDropped, GroupRerolled, MemberFailed
from asyncrl.testing import END
from asyncrl.testing.server import Fault, GenerateCall, ScriptedServer
from asyncrl.types import DropReason
from tests.faults.case import AGAIN, PROBE_TOKENS, One, ServerCase

pytestmark = pytest.mark.usefixtures("threads_in_place")

_URL = "http://one:30000"
_NOT_NOW = (408, 425, 429)
_SIZE = 4


def _case(directory: Path, **options: Any) -> ServerCase:
    One.open = 0

    def seconds(call: GenerateCall) -> float:
        return 0.1 if len(call.input_ids) == PROBE_TOKENS else 1.0

    server = ScriptedServer(tokens=lambda call: [65, 66, 67, END], seconds=seconds)
    return ServerCase(directory, {_URL: server}, group_size=_SIZE, engine={"failures": AGAIN}, **options)


def _body(status: int) -> bytes:
    """The shapes in which servers and what stands before them say why."""
    text = f"no, for reason {status}"
    bodies = [
        f'{{"error":{{"message":"{text}"}}}}',
        f'{{"error":"{text}"}}',
        f'{{"object":"error","message":"{text}","code":{status}}}',
        f'{{"detail":"{text}"}}',
        text,
    ]
    return bodies[status % len(bodies)].encode()


@pytest.mark.slow
@pytest.mark.parametrize("status", range(400, 500))
def test_a_refusal_costs_one_member_and_says_why(tmp_path: Path, status: int) -> None:
    """One request, no second one, no reroll; its siblings are trained. What only says "not now" is asked again."""
    draw = random.Random(status)
    case = _case(tmp_path, max_staleness=draw.choice([0, 2]), forward_backward_batch=None)
    well = draw.randrange(1, 9)  # the first one is the probe's
    case.servers[_URL].fault("/generate", *[Fault()] * well, Fault(status=status, body=_body(status)))
    case.play(2)
    assert (case.of(GroupRerolled), case.of(GroupDropped)) == ([], [])
    case.assert_exactly_once()
    members = [traj for step in case.steps for traj in step.trajectories]
    assert len(members) == 2 * 2 * _SIZE
    failed = case.of(MemberFailed)
    if status in _NOT_NOW:
        assert (failed, [traj for traj in members if traj.dropped]) == ([], [])
        return
    assert [f"no, for reason {status}" in event.error and str(status) in event.error for event in failed] == [True]
    [dropped] = [traj for traj in members if traj.dropped is not None]
    assert (dropped.dropped, dropped.reward, dropped.attempt) == (DropReason.FAILED, None, 1)
    assert f"no, for reason {status}" in str(dropped.error)
    siblings = Counter(traj.dropped for traj in members if traj.group == dropped.group)
    assert siblings == {None: _SIZE - 1, DropReason.FAILED: 1}
    assert case.steps[-1].metrics["ledger/dropped_members/failed"] == 1.0


@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_a_group_goes_on_with_the_members_that_are_left(tmp_path: Path, refused: int) -> None:
    """Fewer than ``min_members`` rewards are compared with the batch; a group without any is dropped, not rerolled."""
    case = _case(tmp_path, groups_per_step=2, forward_backward_batch=None)
    case.servers[_URL].fault("/generate", Fault(), *[Fault(status=400)] * refused)
    case.play(1)
    assert len(case.of(MemberFailed)) == refused
    assert case.of(GroupRerolled) == []
    assert [event.reason for event in case.of(GroupDropped)] == ([DropReason.FAILED] if refused == _SIZE else [])
    trained = Counter(traj.group for traj in case.steps[0].trajectories if traj.dropped is None)
    assert sorted(trained.values()) == ([_SIZE, _SIZE] if refused == _SIZE else [_SIZE - refused, _SIZE])
    case.assert_exactly_once()
