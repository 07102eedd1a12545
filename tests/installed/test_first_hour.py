"""The commands of the README's first hour, from the wheel."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.installed.conftest import Installed
from tests.test_readme import BLOCKS

pytestmark = [pytest.mark.installed, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_first_hour_of_the_readme_runs(asyncrl: Installed) -> None:
    """Line after line, in an empty folder, as it is written; training takes fewer steps."""
    [hour] = [code for language, code in BLOCKS if language == "bash" and "asyncrl init my_task --tools" in code]
    home = asyncrl
    for line in hour.splitlines():
        for command in re.split(r"\s+&&\s+", line.partition(" #")[0].strip()):
            words = shlex.split(command)
            if words[0] == "cd":
                home = Installed(site=home.site, home=home.home / words[1])
            elif words[0] == "pytest":
                home.python("-m", "pytest", "-p", "no:cacheprovider", *words[1:])
            else:
                fewer = ["--set", "trainer.steps=4" if "--resume" in words else "trainer.steps=2"]
                home(*words[1:], *(fewer if words[1] == "train" else []))
    assert (home.home / "trained" / "adapter_config.json").is_file()
