"""The notice of a stall names servers: whole runs through the real client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.testing import END
from asyncrl.testing.server import Fault, ScriptedServer
from asyncrl.types import Message, Trajectory
from tests.faults.case import PROBE_TOKENS, One, ServerCase

pytestmark = pytest.mark.usefixtures("threads_in_place")


def test_three_stuck_members_are_all_named_with_their_servers(tmp_path: Path) -> None:
    """A tool, a reward and a request that a server keeps: through the real client, on two servers."""

    class Stuck(One):
        open = 0

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            await anyio.sleep(200 if traj.id == "000000-000" else 0)
            return None

        async def reward(self, traj: Trajectory, row: Any) -> float:
            await anyio.sleep(200 if traj.id == "000000-001" else 0)
            return float(traj.member)

    servers = {
        url: ScriptedServer(
            tokens=lambda call: [65, END],
            seconds=lambda call: 1.0 if len(call.input_ids) == PROBE_TOKENS or call.input_ids[0] == ord("0") else 200.0,
        )
        for url in ("http://one", "http://two")
    }
    case = ServerCase(tmp_path, servers, Stuck)
    case.play(1, 2)
    told: Any = case.notices("nothing_advances")[0]
    found = [str(told["waits_for"]), *told["others"]]
    assert len(found) == 4
    assert sum("a sampling request" in text for text in found) == 2
    places = [text.split(" at ")[1].split(",")[0] for text in told["others"] if " at " in text]
    assert {told.get("server"), *places} - {None} <= set(servers)
    ours = ("environment's on_turn of 000000-000", "environment's reward of 000000-001")
    assert sum(text.startswith(ours) for text in found) == 2


def test_the_server_that_holds_a_publication_is_named(tmp_path: Path) -> None:
    """With the call that it does not answer."""
    servers = {
        url: ScriptedServer(tokens=lambda call: [65, END], seconds=lambda call: 0.1)
        for url in ("http://one", "http://two")
    }
    servers["http://two"].fault("/load_lora_adapter", Fault(), Fault(hold=True))
    case = ServerCase(tmp_path, servers)
    case.play(2, 2)
    [told] = case.notices("nothing_advances")
    assert told["waits_for"] == "the publication of version 1"
    assert told["call"] == "http://two/load_lora_adapter"
