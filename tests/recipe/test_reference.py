from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.cli.main import main
from asyncrl.errors import ConfigError
from asyncrl.recipe.config import SECTIONS
from asyncrl.recipe.reference import KeyReference, chosen, sections
from asyncrl.recipe.referencepages import RENEW, markdown

_FILE = Path(__file__).parents[2] / "envs" / "REFERENCE.md"
_KEYS = [key for section in sections() for key in section.keys]


@pytest.mark.parametrize("key", _KEYS, ids=lambda key: key.name)
def test_every_key_has_a_type_a_default_and_a_sentence(key: KeyReference) -> None:
    """The sentence stands where the option is declared: below its field, or in its class's docstring."""
    assert key.kind
    assert key.default
    assert len(key.text) > 10, f"{key.name} has no sentence: write one where its class declares it"
    assert key.text[-1] in ".)", key.text
    assert "``" not in key.text


def test_every_section_and_key_of_recipes_is_there() -> None:
    """And those of tables in them, and of losses, which have no section of their own in the code."""
    names = {key.name for key in _KEYS}
    assert {f"{section}.{key}" for section, parts in SECTIONS.items() for part in parts for key in part} <= names
    assert {"model.lora.r", "rollout.kv_cache.on_limit", "sampler.timeouts.outage_s", "loss.eps_max"} <= names
    assert [section.name for section in sections()] == list(SECTIONS)


def test_the_file_is_as_new_as_the_code() -> None:
    """It is written by a command and never by hand."""
    assert _FILE.read_text(encoding="utf-8") == markdown(), f"envs/REFERENCE.md is stale: run {RENEW}"


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("trainer.max_staleness", ["trainer.max_staleness"]),
        ("max_staleness", ["trainer.max_staleness", "rollout.kv_cache.max_staleness"]),
        ("model.lora", ["model.lora", "model.lora.r", "model.lora.alpha", "model.lora.target_modules"]),
        ("run", [key.name for key in _KEYS if key.name.startswith("run.")]),
    ],
)
def test_a_part_can_be_asked_for(part: str, names: list[str]) -> None:
    """A section, a key with or without its section, or a table."""
    assert [key.name for section in chosen(part) for key in section.keys] == names


def test_a_name_that_is_no_key_is_refused_with_the_nearest() -> None:
    """As in a recipe."""
    with pytest.raises(ConfigError, match=r"did you mean 'trainer\.max_staleness'"):
        chosen("trainer.max_stalenes")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipe", "trainer.max_staleness"], ["max_staleness = 2", "(whole number)", "The largest age"]),
        (["recipe", "--metrics", "staleness/"], ["staleness/span_age_max", "(versions)"]),
        (["recipe", "--metrics", "rollout/won_mean"], ["rollout/<key>_mean", "(per member)"]),
        (["recipe", "--metrics", "reward_mean"], ["Metrics of an evaluation"]),
    ],
)
def test_the_command_prints_what_was_asked_for(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """On stdout, as text for people."""
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


def test_the_help_of_the_command_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever asks for help wants the keys."""
    with pytest.raises(SystemExit):
        main(["recipe", "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: asyncrl recipe")
    assert all(f"[{name}]" in printed for name in SECTIONS)


@pytest.mark.parametrize("arguments", [["recipe", "trainer.steeps"], ["recipe", "--metrics", "staleness/ages"]])
def test_what_is_not_there_is_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the name."""
    assert main(arguments) == 2
    assert arguments[-1] in capsys.readouterr().err
