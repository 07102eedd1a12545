"""What the wheel holds, and that its command is the wheel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.installed.conftest import Installed

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
    assert not list(asyncrl.site.rglob("__pycache__"))
