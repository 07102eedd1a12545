"""``asyncrl init`` in an empty folder: its tests pass, it is checked and it trains, without a change and offline."""

from __future__ import annotations

import json

import pytest

from tests.installed.conftest import Installed
from tests.recipe.test_starters import KINDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_a_starter_works_as_it_is(asyncrl: Installed, kind: str) -> None:
    """From the first command to a trained step."""
    task = asyncrl.home / "task"
    asyncrl("init", "task", *([] if kind == "plain" else [f"--{kind}"]))
    done = asyncrl.python("-m", "pytest", "-q", "-p", "no:asyncio", "-W", "error", task)
    assert "passed" in done.stdout
    if kind in ("plain", "tools"):
        return  # the first hour trains one with tools; plain is the one with a judge, without it
    if kind == "script":
        script = task / "train.py"
        script.write_text(script.read_text().replace("STEPS = 80", "STEPS = 2"))
        assert "step 2: reward" in asyncrl.python(script).stdout
        return
    trained = asyncrl("train", task / "recipe.toml", "--set", "trainer.steps=2")
    assert json.loads(trained.stdout.splitlines()[-1])["steps"] == 2
