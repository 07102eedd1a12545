"""The commands of the README's first hour, from the wheel."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.installed.conftest import Installed
from tests.test_readme import BLOCKS

pytestmark = [pytest.mark.installed, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_first_hour_of_the_readme_runs(asyncrl: Installed) -> None:
    """Line after line, in an empty folder, as it is written; training takes fewer steps."""
    [hour] = [code for language, code in BLOCKS if language == "bash" and "asyncrl init my_task --tools" in code]
    home, said = asyncrl, {}
    for line in hour.splitlines():
        for command in re.split(r"\s+&&\s+", line.partition(" #")[0].strip()):
            words = shlex.split(command)
            if words[0] == "cd":
                home = Installed(site=home.site, home=home.home / words[1])
            elif words[0] == "pytest":
                home.python("-m", "pytest", "-p", "no:cacheprovider", *words[1:])
            else:
                fewer = ["--set", "trainer.steps=4" if "--resume" in words else "trainer.steps=2"]
                said[" ".join(words[1:])] = home(*words[1:], *(fewer if words[1] == "train" else [])).stdout
    assert "Where a step's time goes" in said["show first"]
    assert json.loads(said["eval first"])["version"] >= 1
    assert (home.home / "trained" / "adapter_config.json").is_file()


def test_an_error_of_the_user_is_the_users(asyncrl: Installed) -> None:
    """Before anything starts, with the place in the user's file, in a few lines."""
    asyncrl("init", "task")
    env = asyncrl.home / "task" / "env.py"
    env.write_text(env.read_text().replace('row["question"]', 'row["qestion"]'))
    done = asyncrl("train", asyncrl.home / "task" / "recipe.toml", code=2)
    assert "KeyError: 'qestion'" in done.stderr
    assert f"{env}:" in done.stderr
    assert done.stderr.count("\n") <= 15
