"""The environment of the CPU server: what is pinned, what is run, and when it counts as there."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from asyncrl.cli.main import main
from asyncrl.errors import ConfigError, ServerUnavailable
from asyncrl.sampling.sources import KNOWN_VERSIONS
from asyncrl.servers import install
from asyncrl.servers.install import SGLANG_VERSION, commands, install_sglang, installed_python, sglang_directory

REQUIREMENTS = Path(install.__file__).with_name("sglang-cpu.txt")
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def _pins(lines: Sequence[str]) -> dict[tuple[str, str], str]:
    """Version by name and marker; every line is one exact version."""
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        found[requirement.name.lower().replace("_", "-"), str(requirement.marker or "")] = pin.version
    return found


def _environment() -> dict[tuple[str, str], str]:
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return _pins([line for line in lines if not line.startswith("#")])


def test_every_version_is_pinned_and_shared_with_ours() -> None:
    """What both environments have is the same in both, so that one download serves two."""
    ours = _pins(tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["uv"]["constraint-dependencies"])
    theirs = _environment()
    assert theirs["sglang", ""] == SGLANG_VERSION
    assert theirs["torch", ""] == ours["torch", ""]
    differing = {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    assert not differing
    assert {name for name, _ in ours.keys() & theirs.keys()} >= {"numpy", "transformers", "anyio", "nvidia-cudnn-cu13"}


def test_the_pinned_version_is_one_that_the_client_knows() -> None:
    """What we install is what we accept, and what the extra names."""
    assert SGLANG_VERSION in KNOWN_VERSIONS
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["sglang"] == [f"sglang=={SGLANG_VERSION}"]


def test_no_server_is_named() -> None:
    """Packages come from wherever the user's own settings say."""
    assert "://" not in REQUIREMENTS.read_text(encoding="utf-8")
    for command in (*commands(Path("/x"), uv=["uv"]), *commands(Path("/x"), uv=None)):
        assert not {"--index-url", "--extra-index-url", "--find-links", "-i", "-f"} & {*command}


@pytest.mark.parametrize("uv", [["uv"], [sys.executable, "-m", "uv"], None])
def test_everything_is_installed_as_it_stands_and_compiled(uv: list[str] | None) -> None:
    """First the environment, of this Python, then all pins without resolving; by uv, or by what Python brings."""
    make, fill = commands(Path("/cache/env"), uv=uv)
    assert sys.executable in make
    assert make[-1] == "/cache/env"
    assert "/cache/env/bin/python" in fill
    assert {"--no-deps", "-r", str(REQUIREMENTS)} <= {*fill}
    assert {"--compile", "--compile-bytecode"} & {*fill}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The commands that would be run; the first of each pair makes an interpreter."""
    found: list[Sequence[str]] = []

    def run(command: Sequence[str], directory: Path) -> None:
        found.append(command)
        (directory / "bin").mkdir(exist_ok=True)
        (directory / "bin/python").touch()

    monkeypatch.setattr(install, "run_installer", run)
    return found


def test_what_is_complete_is_taken_at_once(tmp_path: Path, runs: list[Sequence[str]]) -> None:
    """The second call runs nothing and gives the same interpreter."""
    said: list[str] = []
    directory = tmp_path / "new/environment"
    first = install_sglang(directory, say=said.append)
    assert (first.made, first.python) == (True, directory / "bin/python")
    assert len(runs) == 2
    second = install_sglang(directory, say=said.append)
    assert (second.made, second.python) == (False, first.python)
    assert len(runs) == 2
    assert installed_python(directory) == first.python


def test_what_is_half_made_or_of_other_versions_is_made_anew(
    tmp_path: Path, runs: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left-overs do not survive, and nobody is handed them."""
    directory = tmp_path / "environment"
    install_sglang(directory, say=lambda _: None)
    (directory / "asyncrl-complete.json").unlink()
    (directory / "left-over").touch()
    assert installed_python(directory) is None
    install_sglang(directory, say=lambda _: None)
    assert not (directory / "left-over").exists()
    assert len(runs) == 4
    (tmp_path / "other.txt").write_text("sglang==0.0.0\n")
    monkeypatch.setattr(install, "_REQUIREMENTS", tmp_path / "other.txt")
    assert installed_python(directory) is None
    assert install_sglang(directory, say=lambda _: None).made
    assert installed_python(directory) is not None


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, runs: list[Sequence[str]]) -> None:
    """A wrong --directory must not cost anybody's files."""
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="--directory is"):
        install_sglang(tmp_path, say=lambda _: None)
    assert (tmp_path / "thesis.txt").exists()
    assert not runs


def test_a_failed_install_is_an_error_with_the_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it does not count as installed."""
    monkeypatch.setattr(install, "find_uv", lambda: [sys.executable, "-c", "import sys; sys.exit('no such package')"])
    with pytest.raises(ServerUnavailable, match=r"(?s)exit code 1.*no such package"):
        install_sglang(tmp_path / "environment", say=lambda _: None)
    assert installed_python(tmp_path / "environment") is None


def _python(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_at_once_make_one(tmp_path: Path) -> None:
    """The second waits for the first, says so, and finds its work done."""
    directory = tmp_path / "environment"
    script = f"""
import sys
from pathlib import Path
from asyncrl.servers import install
def run(command, directory):
    (directory / "bin").mkdir(exist_ok=True)
    (directory / "bin/python").touch()
    print("running", flush=True)
    sys.stdin.readline()
install.run_installer = run
print(install.install_sglang(Path({str(directory)!r}), say=lambda text: print(text, flush=True)).made, flush=True)
"""
    with _python(script) as first, _python("input()\n" + script) as second:
        assert first.stdout is not None
        assert second.stdin is not None
        assert second.stdout is not None
        while first.stdout.readline() != "running\n":
            pass
        second.stdin.write("go\n")
        second.stdin.flush()
        assert "waiting for another process" in second.stdout.readline()
        answers = first.communicate("\n\n\n")[0]
        assert answers.endswith("True\n")
        assert second.communicate()[0].endswith("False\n")


def test_the_command_prints_the_interpreter(
    tmp_path: Path, runs: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON line on stdout; by default in the cache folder, by version."""
    assert main(["install-sglang", "--directory", str(tmp_path / "here")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["python"], result["made"]) == (str(tmp_path / "here/bin/python"), True)


def test_each_python_and_sglang_version_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments of several Pythons live beside each other."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    name = f"sglang-{SGLANG_VERSION}-cpu-py{sys.version_info[0]}{sys.version_info[1]}"
    assert sglang_directory() == Path("/somewhere/asyncrl") / name
