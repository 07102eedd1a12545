"""Servers that are removed at any moment of a run, and come back under the same URL: nobody notices but the servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing import run_virtual
from asyncrl.testing.server import ScriptedServer, network
from tests.faults.eventful import MOMENTS, STEPS, URLS, WAYS, EventfulRun


def _removal(at: int) -> Callable[[EventfulRun, int, ScriptedServer | None, str | None], None]:
    """Of one server at the moment ``at``, which is added again some moments later."""
    gone = URLS[at % len(URLS)]

    def happens(run: EventfulRun, moment: int, server: ScriptedServer | None, route: str | None) -> None:
        if moment == at:
            run.sampler.remove(gone, now=at % 2 == 0)
        elif moment > at + at % 40 and gone not in run.sampler.urls:
            run.sampler.add(gone)

    return happens


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_without_removals_has_these_moments(way: str, tmp_path: Path, threads_in_place: None) -> None:
    """The moments of the tests below are moments of the run."""
    run = EventfulRun(way, tmp_path)
    run_virtual(run.play)
    assert len(run.steps) == STEPS
    assert run.moments >= MOMENTS


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [4, 11])
def test_a_server_may_go_and_come_back_at_any_moment(
    way: str, first: int, tmp_path: Path, threads_in_place: None
) -> None:
    """While it opens, samples, retries, is published to, restored, vacated or asked for its load: no member fails."""
    for at in range(first, MOMENTS, 23):
        directory = tmp_path / str(at)
        directory.mkdir()
        run = EventfulRun(way, directory, _removal(at))
        run_virtual(run.play, seed=at)
        assert (len(run.steps), run.failures) == (STEPS, []), at


@pytest.mark.parametrize("now", [False, True])
async def test_the_last_server_stays(now: bool) -> None:
    """It is refused by name, and everything goes on."""
    one = ScriptedServer()
    sampler = SGLang(["http://one:1"], transport=network({"http://one:1": one}))
    async with sampler.opened():
        with pytest.raises(ConfigError, match="it is the last server"):
            sampler.remove("http://one:1", now=now)
        assert sampler.urls == ["http://one:1"]
