"""Values of other libraries as plain Python, and copies of rows."""

from __future__ import annotations

import copy
import json
import math
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.plain import (
    copied,
    dumps,
    error_text,
    jsonable,
    loads,
    metric,
    number,
    numbers,
    shown,
    text,
    uncopyable_parts,
)

NUMBERS: list[tuple[Any, float]] = [
    (True, 1.0),
    (np.bool_(True), 1.0),
    (torch.tensor(False), 0.0),
    (7, 7.0),
    (np.int8(-3), -3.0),
    (np.float16(0.5), 0.5),
    (np.longdouble(0.25), 0.25),
    (np.array(2), 2.0),
    (np.array([[1.5]]), 1.5),
    (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
    (torch.tensor(3, requires_grad=False), 3.0),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (Decimal("0.5"), 0.5),
    (Fraction(1, 4), 0.25),
]
NO_NUMBERS: list[Any] = [
    None,
    "0.5",
    np.str_("0.5"),
    b"1",
    [1.0],
    {"a": 1},
    1j,
    np.complex64(1),
    np.array([1.0, 2.0]),
    torch.zeros(2),
    np.datetime64("2026-01-01"),
    10**400,
    Decimal("sNaN"),
    object(),
    float,
]


@pytest.mark.parametrize(("value", "expected"), NUMBERS, ids=repr)
def test_numbers_of_every_library_are_floats(value: Any, expected: float) -> None:
    """Of type float exactly, so that ``json.dumps`` takes them."""
    assert (type(number(value)), number(value)) == (float, expected)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_what_is_no_number_is_refused_with_what_it_is(value: Any) -> None:
    """Never with an error of another library."""
    with pytest.raises(TypeError, match="not a number"):
        number(value)


def test_metrics_are_finite_or_nan() -> None:
    """An infinity would make every sum of it useless without a word of why."""
    assert math.isnan(metric(math.inf))
    assert math.isnan(metric(np.float32("-inf")))
    assert math.isnan(metric(torch.tensor(math.nan)))
    odd = {"a": 1.0, "b": None, "c": np.float32(2), 3: 4.0, "d\udce9": 5.0, "e": "6"}
    assert numbers(odd) == {"a": 1.0, "c": 2.0, "3": 4.0, "d\ufffd": 5.0}
    assert numbers(None) == {}


@given(st.text(st.characters() | st.sampled_from("\ud83d\udc4d\udce9\x00"), max_size=30))
@settings(derandomize=True, max_examples=200)
def test_text_is_always_valid_unicode(value: str) -> None:
    """What is valid stays as it is; pairs of surrogates become the character that they stand for."""
    made = text(value)
    made.encode()
    try:
        value.encode()
    except UnicodeEncodeError:
        assert text(made) == made
    else:
        assert made == value
    assert text("\ud83d\udc4d \udce9") == "\U0001f44d \ufffd"


class _NoRepr:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    "value", [_NoRepr(), "x" * 10**6, [["y" * 10**5]] * 9, "\udce9", 10**5000], ids=lambda value: type(value).__name__
)
def test_what_is_shown_to_a_person_is_short_and_valid(value: Any) -> None:
    """Whatever a model or a user wrote."""
    assert len(shown(value)) < 200
    shown(value).encode()
    assert len(error_text(ValueError(value))) < 2100
    error_text(ValueError(value)).encode()


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=4)
    | st.sampled_from(
        [10**30, -(2**64), "\udce9", np.float32(1.5), np.arange(3), torch.ones(2), Decimal("0.1"), object()]
    )
)
KEYS = st.text(max_size=4) | st.integers() | st.tuples(st.integers()) | st.just("\udce9")
DATA = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@pytest.mark.slow
@given(DATA)
@settings(derandomize=True, max_examples=150)
def test_anything_can_be_written_as_json_and_read_back(value: Any) -> None:
    """By the strictest reader: no NaN, no other keys than text."""
    plain = jsonable(value)
    again = json.loads(json.dumps(plain, allow_nan=False))
    json.dumps(again, ensure_ascii=False).encode()
    assert again == plain


def test_what_json_lacks_is_asked_for_by_its_path() -> None:
    """So that the one who refuses it can name it."""
    seen: list[str] = []

    def odd(path: str, value: object) -> str:
        seen.append(path)
        return "odd"

    jsonable({"a": [1, {"b": object()}], (1,): 2}, odd)
    assert seen == ["['a'][1]['b']", "[key]"]
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    assert "[[" in json.dumps(jsonable(deep))


@pytest.mark.slow
@given(DATA)
@settings(derandomize=True, max_examples=200)
def test_a_copy_of_plain_data_is_equal_and_shares_nothing(row: Any) -> None:
    """Two members of a group never see what the other does to its row."""
    before = repr(row)
    made = copied(row)
    assert type(made) is type(row)
    assert repr(copy.copy(made)).split(" at 0x")[0] == before.split(" at 0x")[0]
    _spoil(made)
    assert repr(row) == before


def _spoil(value: Any) -> None:
    if isinstance(value, dict):
        for item in value.values():
            _spoil(item)
        value.clear()
    elif isinstance(value, list):
        for item in value:
            _spoil(item)
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            _spoil(item)
    elif isinstance(value, np.ndarray | torch.Tensor):
        value[...] = -1


def test_what_cannot_be_copied_is_shared_and_named() -> None:
    """A lock in a row, a generator, a row that contains itself."""
    lock = threading.Lock()
    row = {"q": ["text"], "lock": lock, "inner": [{"stream": (i for i in "ab")}]}
    made = copied(row)
    assert made["lock"] is lock
    assert made["q"] is not row["q"]
    assert uncopyable_parts(row) == ["row['lock'] (lock)", "row['inner'][0]['stream'] (generator)"]
    assert uncopyable_parts({"q": [1, (2, "a")], "x": np.arange(3)}) == []
    itself: list[Any] = []
    itself.append(itself)
    assert copied(itself) is itself
    assert uncopyable_parts(itself) == ["row (it is nested too deeply, or contains itself)"]


def test_what_contains_itself_is_described_where_it_does() -> None:
    """Once, and not again in each of its own parts."""
    loop: list[Any] = [1]
    loop += [loop, loop]
    assert jsonable(loop) == [1, "[1, [...], [...]]", "[1, [...], [...]]"]


def test_what_contains_itself_is_written_once() -> None:
    """An environment may have put it into its messages, and the state of the run must be saved all the same."""
    message: dict[str, Any] = {"role": "user", "content": {"a": 1}}
    message["content"]["whole"] = message
    found = loads(dumps({"messages": [message], "message": message}))
    assert found["message"]["role"] == "user"
    assert found["message"]["content"]["a"] == 1
    assert len(dumps(message)) < 1000
