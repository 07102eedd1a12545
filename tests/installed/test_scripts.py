"""A script of a user, from the wheel: by python, and by the command."""

from __future__ import annotations

import json

import pytest

from tests.installed.conftest import Installed
from tests.training.test_running import write_script

pytestmark = pytest.mark.slow


def test_a_script_trains_by_itself_and_by_the_command(asyncrl: Installed) -> None:
    """It keeps its run in ``runs``, and the command goes on with it."""
    script = write_script(asyncrl.home, steps=2)
    done = asyncrl.python(script)
    assert done.stdout == "after 2\n"
    [folder] = (asyncrl.home / "runs").iterdir()
    assert f"the run is kept in runs/{folder.name}" in done.stderr
    resumed = asyncrl("train", write_script(asyncrl.home, steps=4), "--resume", folder)
    assert json.loads(resumed.stdout.splitlines()[-1])["steps"] == 4
