"""Any call of a run, of any route, is accepted and never answered: the run goes on, and soon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from asyncrl.testing import run_virtual
from asyncrl.testing.server import Fault, ScriptedServer
from tests.faults.eventful import MOMENTS, STEPS, WAYS, EventfulRun

_LONGEST_S = 4 * 3600.0


def _hang(at: int) -> Callable[[EventfulRun, int, ScriptedServer | None, str | None], None]:
    """The call that comes at the moment ``at``, or the next one if that is an event, is never answered."""
    fault = Fault(hold=True) if at % 2 else Fault(drip=True)
    done = False

    def happens(run: EventfulRun, moment: int, server: ScriptedServer | None, route: str | None) -> None:
        nonlocal done
        if server is not None and route is not None and moment >= at and not done:
            done = True
            server.fault(route, fault)

    return happens


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [0, 9])
def test_any_call_may_hang(way: str, first: int, tmp_path: Path, threads_in_place: None) -> None:
    """Sampling, probes, loads of adapters and weights, pauses, reports of load, aborts: none holds the run for ever."""
    for at in range(first, MOMENTS, 31):
        directory = tmp_path / str(at)
        directory.mkdir()
        run = EventfulRun(way, directory, _hang(at))

        async def main(run: EventfulRun = run) -> float:
            await run.play()
            return anyio.current_time()

        took_s = run_virtual(main, seed=at)
        assert (len(run.steps), run.failures) == (STEPS, []), at
        assert took_s < _LONGEST_S, at
