from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from asyncrl.flags import add_flags
from asyncrl.servers.embedded.options import ServerOptions
from asyncrl.servers.serving import add_server_flags
from asyncrl.servers.sglangcommand import SGLangOptions


@dataclass(kw_only=True)
class _Options:
    model_path: Path
    """Folder with 100 %
    of a ``model``."""
    port: int | None = None
    share: float = 0.5
    """A part."""
    mode: Literal["wait", "keep"] = "wait"
    names: tuple[str, ...] = ()
    quiet: bool = False


def _parser(**options: object) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="it")
    add_flags(parser, _Options, _Options.__dataclass_fields__, **options)  # type: ignore[arg-type]
    return parser


def test_every_field_is_a_flag_of_its_type() -> None:
    """What is not given is left out, so that the dataclass has the defaults."""
    given = _parser().parse_args(
        ["--model-path", "a", "--port", "3", "--share", "1", "--mode", "keep", "--names", "x", "y", "--quiet"]
    )
    assert vars(given) == {
        "model_path": Path("a"),
        "port": 3,
        "share": 1.0,
        "mode": "keep",
        "names": ["x", "y"],
        "quiet": True,
    }
    assert vars(_parser().parse_args(["--model-path", "a"])) == {"model_path": Path("a")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --model-path"),
        (["--model-path", "a", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--model-path", "a", "--mode", "hope"], "argument --mode: invalid choice: 'hope'"),
    ],
)
def test_other_values_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2 and the flag's name."""
    with pytest.raises(SystemExit) as raised:
        _parser().parse_args(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_is_what_the_class_says() -> None:
    """Without the marks of code, and on one line."""
    text = " ".join(_parser().format_help().split())
    assert "--model-path PATH Folder with 100 % of a model." in text
    assert "--share X A part." in text


def test_every_option_of_a_server_has_a_flag() -> None:
    """One that is added needs no second place; keys, adapters and arguments have flags of other names."""
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    flags = {action.dest for action in parser._actions}
    fields = {*ServerOptions.__dataclass_fields__, *SGLangOptions.__dataclass_fields__}
    assert fields - flags == {"api_key", "admin_key", "lora"}
    assert {"api_key_env", "admin_key_env", "lora_rank", "lora_modules"} < flags
