"""The README says what is: its code runs, its commands are there, and its links work on other pages too."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli.main import make_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    command
    for language, code in BLOCKS
    if language == "bash"
    for line in code.splitlines()
    for command in re.split(r"\s+&&\s+", line.partition(" #")[0].strip())
    if command
]
FOLDER = "https://github.com/asyncrl/asyncrl/blob/main/"
# What blocks leave to what was said before them.
BEFORE = """
import asyncrl as rl
from asyncrl.testing import ScriptedModel, scripted_policy

class MathEnv(rl.Env):
    async def reset(self, row):
        return [{"role": "user", "content": "?"}]

    async def reward(self, traj, row):
        return float(traj.member)

log = print
rows = [{"question": "?"}] * 4
model = ScriptedModel(["42"])
policy = scripted_policy(sampler=model)
"""


def _file_of(code: str) -> Path | None:
    """The file that a block shows: its first line names it."""
    name = code.partition("\n")[0].removeprefix("# ")
    path = ROOT / name
    return path if name.endswith(".py") and path.is_file() else None


@pytest.mark.parametrize("code", [code for code in PYTHON if _file_of(code)], ids=lambda code: code.split("\n")[0])
def test_a_file_that_is_shown_is_that_file(code: str) -> None:
    """Each is tried by a test of its own."""
    path = _file_of(code)
    assert path is not None
    assert code.partition("\n")[2].strip() == path.read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("number", [number for number, code in enumerate(PYTHON) if not _file_of(code)])
def test_python_of_the_readme_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    """As a module, after what was said before it; what awaits is in a coroutine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my-model").symlink_to(tiny_model("qwen3"))
    code = PYTHON[number]
    if re.search(r"^(async for|await)", code, flags=re.MULTILINE):
        code = f"async def main(trainer):\n{textwrap.indent(code, '    ')}"
    file = tmp_path / f"readme_{number}.py"
    file.write_text(f"{BEFORE}\n{code}", encoding="utf-8")
    ast.parse(code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    for name, function in vars(module).items():
        if name.startswith("test_"):
            function()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_readme_are_there(command: str) -> None:
    """With the options that they are shown with."""
    words = shlex.split(command)
    for prefix in (["pip", "install"], ["uv", "run"]):
        if words[:2] == prefix:
            words = words[2:]
    while words[:1] == ["--extra"]:
        words = words[2:]
    if words[0] == "asyncrl" and words[1:] != ["[sglang]"]:
        make_parser().parse_args([word for word in words[1:] if word != ".."])
    elif words[0] == "python":
        assert words[1].endswith(".py")
    else:
        assert words[0] in ("uv", "git", "cd", "pytest", "asyncrl[sglang]", "asyncrl[plot]", "asyncrl[smollm]")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)\s]+)\)", README))))
def test_links_are_absolute_and_lead_to_files(target: str) -> None:
    """The page is shown in other places than the repository too."""
    if target.startswith("#"):
        titles = re.findall(r"^#+ (.*)$", README, flags=re.MULTILINE)
        assert target[1:] in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    elif target.startswith(FOLDER):
        assert (ROOT / target.removeprefix(FOLDER)).exists()
    else:
        assert target.startswith("https://")
