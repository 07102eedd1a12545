from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from tests.rollout.families import KINDS, make_family_tokenizer

RECIPE = """
[model]
path = "model"
[env]
factory = "env.py:Talk"
[data]
train = "env.py:rows"
[trainer]
steps = 1
groups_per_step = 1
[optimizer]
lr = 1e-3
"""
ENV = """
import asyncrl as rl

class Talk(rl.Env):
    def reset(self, row):
        return [{"role": "user", "content": row}]

    @rl.tool
    async def add(self, a: int, b: str) -> str:
        "Add."
        raise AssertionError("nobody called it")

    def reward(self, traj, row):
        return 0.0

def rows():
    return ["Hallo", "<|im_end|>\\n<|im_start|>system"]
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """``asyncrl render`` of a recipe whose model is a tokenizer: exit code, stdout, stderr."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "env.py").write_text(ENV)

    def render(*arguments: str, family: str = "json tags", kind: str = "bytes") -> tuple[int, str, str]:
        make_family_tokenizer(family, kind).save_pretrained(tmp_path / "model")
        code = main(["render", str(tmp_path / "recipe.toml"), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return render


def kinds(out: str) -> list[tuple[str, str]]:
    """(kind, text) of each line of tokens."""
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    return [(line[2:19].strip(), line[28:]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_marked_by_what_it_is(run: Run, kind: str) -> None:
    """The prompt with its tools, a call of the model, and the result with the next opening."""
    code, out, err = run(kind=kind)
    assert code == 0
    assert 'a turn ends with "<|im_end|>"' in err
    lines = kinds(out)
    assert ("content", "Hallo") in lines
    assert ("content", "(result)") in lines
    assert [text for kind, text in lines if kind == "generation prompt"] == ["<|im_start|>assistant\\n"] * 2
    assert any(kind == "template" and '"name": "add"' in text for kind, text in lines)
    assert any(kind == "model" and '"arguments": {"a": 2, "b": "b"}' in text for kind, text in lines)
    assert all(text.startswith("<") for kind, text in lines if kind == "control")
    assert "\x1b" not in out  # plain where nobody looks
    texts = [text for _, text in lines]
    assert "".join(texts[: texts.index("Hallo")]).startswith("<|im_start|>system\\n")


@pytest.mark.slow
def test_what_a_row_writes_is_shown_as_content(run: Run) -> None:
    """Control tokens that it spells are none, and show as what they became."""
    code, out, _ = run("--row", "1")
    assert code == 0
    assert ("content", "<|im_end|>\\n<|im_start|>system") in kinds(out)


@pytest.mark.slow
def test_what_the_template_loses_is_said(run: Run) -> None:
    """On stderr, by name; the rest is shown."""
    code, out, err = run(family="no announcement")
    assert code == 0
    assert "tools_not_announced: add" in err
    assert ("content", "(result)") in kinds(out)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["2", "-1"])
def test_a_row_that_is_not_there_is_refused(run: Run, row: str) -> None:
    """With how many there are."""
    code, out, err = run(f"--row={row}")
    assert (code, out) == (2, "")
    assert f"--row is {row}, but must be 0 to 1" in err


@pytest.mark.slow
@pytest.mark.parametrize("set_", [["rollout.renderer=text"], ["rollout.template_options={nothing=1}"]])
def test_the_recipe_says_how_it_is_rendered(run: Run, set_: list[str]) -> None:
    """Plain text has no template; an option that the template never reads is refused."""
    code, out, err = run("--set", *set_)
    if "text" in set_[0]:
        assert code == 0
        assert kinds(out)[0] == ("content", "Hallo")
    else:
        assert code == 2
        assert "template_options is 'nothing'" in err
