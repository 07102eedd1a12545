from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from asyncrl.errors import ConfigError
from asyncrl.recipe.tables import keys_of, override, read_keywords, read_table


@dataclass(frozen=True, kw_only=True)
class _Inner:
    r: int = 8


@dataclass(frozen=True, kw_only=True)
class _Section:
    steps: int
    rate: float = 1.0
    mode: Literal["wait", "keep"] = "wait"
    name: str | None = None
    urls: tuple[str, ...] = ()
    inner: _Inner | None = None
    plain: _Inner = field(default_factory=_Inner)
    batch: Literal["auto"] | _Inner = "auto"
    causes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError.for_value("section.steps", self.steps, "at least 1")


def test_a_table_becomes_its_dataclass() -> None:
    """Defaults stay, lists become tuples, integers may stand for floats, tables are read by the fields they fill."""
    table = {"steps": 3, "rate": 2, "urls": ["a", "b"], "inner": {"r": 4}, "batch": {"r": 2}, "causes": {"turns": 1.0}}
    assert read_table(_Section, table, "section") == _Section(
        steps=3, rate=2.0, urls=("a", "b"), inner=_Inner(r=4), batch=_Inner(r=2), causes={"turns": 1.0}
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "section.steps is missing"),
        ({"steps": "5"}, "section.steps is '5', but must be a valid integer"),
        ({"steps": True}, "section.steps is True, but must be a valid integer"),
        ({"steps": 1.5}, "section.steps is 1.5"),
        ({"steps": 0}, "section.steps is 0, but must be at least 1"),
        ({"steps": 1, "rate": "fast"}, "section.rate is 'fast', but must be a valid number"),
        ({"steps": 1, "mode": "wiat"}, "section.mode is 'wiat', but must be 'wait' or 'keep'"),
        ({"steps": 1, "stpes": 2}, "section: unknown key 'stpes'; did you mean 'steps'?"),
        ({"steps": 1, "zzz": 2}, "section: unknown key 'zzz'; known: batch, causes, inner, mode"),
        ({"steps": 1, "urls": "a"}, "section.urls is 'a'"),
        ({"steps": 1, "inner": 5}, "section.inner is 5"),
        ({"steps": 1, "plain": 5}, "section.plain is 5, but must be a table"),
        ({"steps": 1, "inner": {"rr": 5}}, "section.inner: unknown key 'rr'; did you mean 'r'?"),
        ({"steps": 1, "inner": {"r": "x"}}, "section.inner.r is 'x'"),
        ({"steps": 1, "batch": "always"}, "section.batch is 'always', but must be 'auto'"),
        (7, "section is 7, but must be a table"),
    ],
)
def test_every_refusal_names_the_key_the_value_and_what_is_allowed(table: Any, message: str) -> None:
    """A typing mistake is found by reading one line."""
    with pytest.raises(ConfigError) as raised:
        read_table(_Section, table, "section")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("trainer.steps=2", {"trainer": {"steps": 2, "loss": "ppo"}}),
        ("trainer.loss=cispo", {"trainer": {"steps": 40, "loss": "cispo"}}),
        ("trainer.loss='cispo'", {"trainer": {"steps": 40, "loss": "cispo"}}),
        ("optimizer.lr=1e-5", {"trainer": {"steps": 40, "loss": "ppo"}, "optimizer": {"lr": 1e-5}}),
        ("model.lora.r = 4", {"trainer": {"steps": 40, "loss": "ppo"}, "model": {"lora": {"r": 4}}}),
        ("sampler.urls=['a=b']", {"trainer": {"steps": 40, "loss": "ppo"}, "sampler": {"urls": ["a=b"]}}),
    ],
)
def test_an_override_replaces_one_value(assignment: str, expected: Mapping[str, Any]) -> None:
    """Values are TOML, and bare words are strings; tables on the way are made."""
    tables = {"trainer": {"steps": 40, "loss": "ppo"}}
    assert override(tables, assignment) == expected
    assert tables == {"trainer": {"steps": 40, "loss": "ppo"}}


@pytest.mark.parametrize("assignment", ["steps", "steps=2", "=2", "trainer.=2", ".steps=2"])
def test_an_override_without_a_key_is_refused(assignment: str) -> None:
    """The message shows the form."""
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        override({}, assignment)


def test_an_override_below_a_value_is_refused() -> None:
    """``trainer.steps`` is a number and has no keys."""
    with pytest.raises(ConfigError, match="steps is 40 and no table, so it has no key 'n'"):
        override({"trainer": {"steps": 40}}, "trainer.steps.n=1")


class _Server:
    """Not a value that a file could have."""


def _run(
    steps: int,
    *,
    folder: Path | None = None,
    stop: Sequence[str] = (),
    server: _Server | None = None,
    source: str | _Server = "here",
    batch: _Inner | Literal["auto"] | None = "auto",
    given: int = 3,
) -> None:
    """Options of different kinds."""


def test_the_keys_are_the_parameters_whose_values_a_file_can_say() -> None:
    """Of a union what can be said is left; a parameter of which nothing is left has no key."""
    keys = keys_of(_run, without=("given",))
    assert list(keys) == ["steps", "folder", "stop", "source", "batch"]
    assert read_keywords(keys, {"steps": 2}, "run") == {
        "steps": 2,
        "folder": None,
        "stop": (),
        "source": "here",
        "batch": "auto",
    }
    table = {"steps": 2, "folder": "a/b", "stop": ["x"], "source": "there", "batch": {"r": 2}}
    assert read_keywords(keys, table, "run") == {
        "steps": 2,
        "folder": Path("a/b"),
        "stop": ("x",),
        "source": "there",
        "batch": _Inner(r=2),
    }


def test_off_is_none_where_none_is_not_the_default() -> None:
    """TOML has no word for it."""
    keys = keys_of(_run)
    assert read_keywords(keys, {"steps": 2, "batch": "off"}, "run")["batch"] is None
    with pytest.raises(ConfigError, match=r"run.batch is 'on', but must be 'auto' or 'off' or a table"):
        read_keywords(keys, {"steps": 2, "batch": "on"}, "run")
    assert read_keywords(keys, {"steps": 2, "folder": "off"}, "run")["folder"] == Path("off")
