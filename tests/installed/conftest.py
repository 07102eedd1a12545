"""The package as users have it: a wheel, and a command that runs in an empty folder and does not see the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The unpacked wheel at ``site``, and the empty folder ``home`` in which its command runs."""

    site: Path
    home: Path

    def __call__(
        self, *arguments: str | Path, code: int = 0, environment: Mapping[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run ``asyncrl`` with ``arguments`` and require the exit code ``code``."""
        return self.python("-m", "asyncrl", *arguments, code=code, environment=environment, timeout=timeout)

    def python(
        self, *arguments: str | Path, code: int = 0, environment: Mapping[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with ``arguments`` and require the exit code ``code``."""
        # Dependencies are those of this environment; the package itself is the wheel's.
        own = {
            "PYTHONPATH": str(self.site),
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.site.parent / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.home,
            env={**os.environ, **own, **(environment or {})},
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=CHECKOUT,
        check=True,
        capture_output=True,
    )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def asyncrl(site: Path, tmp_path: Path) -> Installed:
    """The command of the wheel in an empty folder. Caches, such as the demo's model, are kept between tests."""
    return Installed(site=site, home=tmp_path)
