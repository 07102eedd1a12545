"""What the wheel holds, and that its command is the wheel's."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.installed.conftest import CHECKOUT, Installed

pytestmark = [pytest.mark.installed, pytest.mark.slow]


def test_the_command_runs_from_the_wheel(asyncrl: Installed) -> None:
    """In an empty folder, without the checkout."""
    assert "train" in asyncrl("--help").stdout
    found = asyncrl.python("-c", "import asyncrl; print(asyncrl.__file__)").stdout
    assert Path(found.strip()).is_relative_to(asyncrl.site)


def test_the_wheel_has_the_recipes_and_nothing_of_the_tests(asyncrl: Installed) -> None:
    """Users copy from ``envs``, which is inside the package there."""
    assert (asyncrl.site / "asyncrl" / "envs" / "guess_number" / "recipe.toml").is_file()
    assert (asyncrl.site / "asyncrl" / "__init__.pyi").is_file()
    assert not (asyncrl.site / "tests").exists()
    [wheel] = asyncrl.site.parent.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "__pycache__" in name]


def test_the_wheel_says_what_it_is(asyncrl: Installed) -> None:
    """Its version is that of the command and of the package; links, licence and extras are there."""
    [info] = asyncrl.site.glob("asyncrl-*.dist-info")
    about = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    assert asyncrl("--version").stdout == f"asyncrl {about['Version']}\n"
    assert asyncrl.python("-c", "import asyncrl; print(asyncrl.__version__)").stdout == f"{about['Version']}\n"
    links = dict(line.split(", ") for line in about.get_all("Project-URL") or ())
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= links.keys()
    assert about["License-Expression"] == "Apache-2.0"
    assert (info / "licenses" / "LICENSE").is_file()
    assert {"plot", "sglang", "smollm"} == {*(about.get_all("Provides-Extra") or ())}
    changes = (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{about['Version']}]" in changes
