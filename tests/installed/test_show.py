"""``asyncrl show`` of the wheel, in a folder without sources."""

from __future__ import annotations

import json

import pytest

from tests.installed.conftest import Installed

pytestmark = [pytest.mark.installed, pytest.mark.slow]


def test_a_run_is_shown_after_it_was_trained(asyncrl: Installed) -> None:
    """One screen, and its conversations."""
    asyncrl("demo", "--set", "trainer.steps=2", "--run-dir", "first")
    screen = asyncrl("show", "first").stdout
    assert "finished, 2 steps" in screen
    assert "Where a step's time goes" in screen
    assert "user: <start>" in asyncrl("show", "first", "--best").stdout
    kept = asyncrl("show", "first", "--step", "1", "--limit", "0", "--json").stdout.splitlines()
    assert {json.loads(line)["n"] for line in kept} == {1}
    assert "the nearest are 1 and 2" in asyncrl("show", "first", "--step", "9", code=2).stderr
