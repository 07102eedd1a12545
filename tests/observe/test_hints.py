from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl
from asyncrl.events import Notice
from asyncrl.observe.hints import HINTS
from asyncrl.observe.sinks import encode_event

_PACKAGE = Path(asyncrl.__file__).parent
_BY_VARIABLE = {
    "conversation_not_continued",
    "old_spans_masked",
    "row_is_shared",
    "snapshot_damaged",
    "staleness_not_bounded",
    "state_not_saved",
    "stragglers_discarded",
    "stragglers_truncated",
    "tools_not_announced",
    "truncated_dropped",
    "weights_damaged",
    "weights_not_saved",
}
# Names that reach a notice through a variable.


def _emitted(path: Path) -> Iterator[str]:
    """The names of notices that a module writes out: first arguments of ``notice(..)``, or ``name=``."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        names = [keyword.value for keyword in call.keywords if keyword.arg == "name"]
        if function in ("notice", "_notice", "_warn"):
            names += call.args[:1]
        if function in ("notice", "_notice", "_warn", "Notice", "Problem"):
            yield from (name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str))


def test_every_notice_has_a_hint_and_every_hint_a_notice() -> None:
    """A new notice says what to do about it; one that is gone leaves nothing behind."""
    emitted = {name for path in sorted(_PACKAGE.rglob("*.py")) for name in _emitted(path)}
    assert "loop_held" in emitted
    assert set(HINTS) == emitted | _BY_VARIABLE


@pytest.mark.parametrize("name", sorted(HINTS))
def test_a_notice_in_the_files_has_its_hint(name: str) -> None:
    """Whoever reads events.jsonl later needs no other table."""
    assert json.loads(encode_event(Notice(time=0.0, name=name)))["hint"] == HINTS[name]
    assert HINTS[name].isascii()
    assert len(HINTS[name]) < 300
