"""The table of differences has no entry that no case reads."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conformance.differences import DIFFERENCES

CASES = {
    node.name: ast.unparse(node)
    for file in Path(__file__).parent.glob("test_*.py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.AsyncFunctionDef)
}


def test_each_difference_is_of_a_case_that_asks_for_it() -> None:
    """An entry of a case that was renamed, or that never looks, would say nothing."""
    for entry in DIFFERENCES:
        assert "subject.differs()" in CASES[entry.case], entry.case
        assert entry.reason.endswith(".")
    asking = {name for name, source in CASES.items() if "subject.differs()" in source}
    assert asking == {entry.case for entry in DIFFERENCES}


def test_a_case_differs_once_for_each_server() -> None:
    """There is one thing that a server does instead."""
    keys = [(entry.kind, entry.case) for entry in DIFFERENCES]
    assert len(set(keys)) == len(keys)
