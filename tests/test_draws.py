"""Every draw in tests, benchmarks and environments has a seed, so that a run which failed can be repeated."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
FILES = sorted(file for folder in ("tests", "benchmarks", "envs") for file in (ROOT / folder).rglob("*.py"))
# Their global generators are seeded by conftest.py alone.
GLOBAL = {
    "random": {"random", "randrange", "randint", "uniform", "choice", "choices", "sample", "shuffle", "gauss", "seed"}
    | {"expovariate", "paretovariate", "lognormvariate", "normalvariate", "betavariate", "getrandbits", "randbytes"},
    "torch": {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like", "randn_like"},
}
GENERATORS = {"random.Random", "np.random.default_rng", "numpy.random.default_rng"}
SEEDED = {"tests/conftest.py"}
KILLED = {"benchmarks/killed.py"}
# Real processes that are killed at real times: nothing repeats them.


def unseeded(source: str) -> Iterator[str]:
    """Calls in ``source`` whose draws nothing repeats: of a global generator, or of a new one without a seed.

    A generator that an object makes in its ``__init__`` is seeded later, by its ``reset``.
    """
    tree = ast.parse(source)
    later = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        module, _, function = name.rpartition(".")
        given = {keyword.arg for keyword in node.keywords}
        if function in GLOBAL.get(module, ()) and "generator" not in given:
            yield f"{name} in line {node.lineno}"
        elif name in GENERATORS and not node.args and id(node) not in later:
            yield f"{name}() in line {node.lineno}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("random.random()", ["random.random in line 1"]),
        ("x = 1\nrandom.shuffle(x)", ["random.shuffle in line 2"]),
        ("torch.randn(3)", ["torch.randn in line 1"]),
        ("torch.randn(3, generator=g)", []),
        ("random.Random()", ["random.Random() in line 1"]),
        ("random.Random(0).random()", []),
        ("np.random.default_rng()", ["np.random.default_rng() in line 1"]),
        ("np.random.default_rng(0)", []),
        ("class A:\n    def __init__(self):\n        self.draw = random.Random()", []),
    ],
)
def test_draws_without_a_seed_are_found(source: str, found: list[str]) -> None:
    """The next test would fail with them."""
    assert list(unseeded(source)) == found


def test_no_draw_is_without_a_seed() -> None:
    """Ruff's NPY002 keeps numpy's global generator out, this the others."""
    found = {str(file.relative_to(ROOT)): list(unseeded(file.read_text(encoding="utf-8"))) for file in FILES}
    assert len(found) > 100
    assert {file: draws for file, draws in found.items() if draws and file not in SEEDED | KILLED} == {}


FIRST: list[tuple[float, ...]] = []


@pytest.mark.parametrize("time", [1, 2])
def test_global_generators_start_anew_in_each_test(time: int) -> None:
    """Also those that a library uses; so it does not matter which tests ran before."""
    drawn = (hash(random.getstate()), np.random.random(), torch.initial_seed())  # noqa: NPY002  what is tested
    FIRST.append(drawn)
    assert drawn == FIRST[0]


def test_hypothesis_repeats_and_has_no_deadline() -> None:
    """Whatever a test's own settings replace: they begin with these."""
    assert hypothesis.settings().derandomize
    assert hypothesis.settings().deadline is None
