"""``asyncrl init``: what it writes, and what it refuses to write over. That it works is tried from the wheel."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.cli.main import main
from asyncrl.errors import ConfigError
from asyncrl.recipe.config import load_recipe
from asyncrl.recipe.rehearsal import spells
from asyncrl.recipe.starters import Starter, write_starter
from asyncrl.rollout.renderer import ChatRenderer
from asyncrl.testing.bytetokenizer import ByteTokenizer

KINDS = sorted(get_args(Starter))


@pytest.mark.parametrize("kind", KINDS)
def test_a_starter_is_a_folder_of_files(kind: Starter, tmp_path: Path) -> None:
    """All that it says to have written, and a recipe that is read, unless a script stands in its place."""
    folder = tmp_path / "above" / "my-task_2"
    files = write_starter(folder, kind)
    assert files == sorted(path.name for path in folder.iterdir())
    assert {"README.md", "env.py", "test_env.py", "rows.jsonl", "tiny_model.py"} < set(files)
    assert ("train.py" in files) is (kind == "script")
    if kind != "script":
        assert load_recipe(folder / "recipe.toml").data.train == "rows.jsonl"


@pytest.mark.parametrize("kind", KINDS)
def test_the_readme_has_every_file(kind: Starter, tmp_path: Path) -> None:
    """And no other."""
    files = write_starter(tmp_path / "task", kind)
    lines = (tmp_path / "task" / "README.md").read_text().splitlines()
    named = {line.split("`")[1] for line in lines if line.startswith("| `")}
    assert named == set(files) - {"README.md"}


def test_the_command_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three commands, to be copied."""
    folder = tmp_path / "a b" / "task"
    assert main(["init", str(folder), "--tools"]) == 0
    *_, first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"  cd '{folder}' && pytest -q"
    assert (second, third) == ("  asyncrl check recipe.toml", "  asyncrl train recipe.toml")


def test_what_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a folder with anything in it nor a file; an empty folder is taken."""
    folder = tmp_path / "task"
    folder.mkdir()
    assert main(["init", str(folder)]) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["init", str(folder), "--judge"]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        write_starter(tmp_path / "file", "plain")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_starter(tmp_path / "file" / "task", "plain")


def test_a_tiny_model_that_cannot_spell_is_known() -> None:
    """A check then writes its made-up calls with another tokenizer."""

    class FewWords(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return [id if id >= 256 or id < 97 else 63 for id in super().encode(text)]

    assert spells(ChatRenderer(ByteTokenizer()))
    assert not spells(ChatRenderer(FewWords()))


@given(name=st.text(st.characters(blacklist_characters="/\0"), min_size=1, max_size=12).filter(lambda n: n[0] != "."))
def test_a_name_is_refused_or_can_be_typed(name: str) -> None:
    """Whatever it is: what is allowed needs no quotes and is no option."""
    plain = name.isascii() and name[0].isalpha() and all(letter.isalnum() or letter in "_-" for letter in name)
    folder = Path("/proc/nowhere") / name  # where nothing can be written
    with pytest.raises(ConfigError, match="cannot be written" if plain else "begin with a letter"):
        write_starter(folder, "plain")
