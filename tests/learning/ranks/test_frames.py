"""What travels between driver and ranks arrives as it was, and what is no frame is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncrl.learning.ranks.frames import PREFIX_BYTES, Frame, FrameError, lengths, read_frame

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARRAYS = st.dictionaries(
    st.text("abc/.", min_size=1, max_size=5),
    arrays.arrays(
        st.sampled_from([np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.int64)]),
        arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4),
    ),
    max_size=3,
)


@settings(max_examples=30)
@given(header=st.dictionaries(st.text(), JSON, max_size=4), values=ARRAYS)
def test_a_frame_arrives_as_it_was(header: dict[str, Any], values: dict[str, Any]) -> None:
    """Header and arrays, with their types and shapes, whatever they are; and nothing behind them is read."""
    source = io.BytesIO(Frame.of(header, values).encoded() + b"next")
    frame = read_frame(source.read)
    assert frame.header == header
    found = frame.arrays()
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
        assert found[name].flags.writeable
    assert source.read() == b"next"


@given(st.binary(min_size=PREFIX_BYTES, max_size=64))
def test_what_is_no_frame_is_refused(content: bytes) -> None:
    """By its first bytes, before any length in it is believed."""
    if not content.startswith(b"ARL1"):
        with pytest.raises(FrameError, match="another protocol"):
            read_frame(io.BytesIO(content).read)


def test_a_frame_longer_than_allowed_is_refused_by_its_length() -> None:
    """Before anything of it is read."""
    encoded = Frame(header={"a": "x" * 100}).encoded()
    with pytest.raises(FrameError, match="at most 50"):
        lengths(encoded[:PREFIX_BYTES], most_bytes=50)


@pytest.mark.parametrize("header", [b"[1]", b"{", b"\xff"])
def test_a_header_that_is_no_object_is_refused(header: bytes) -> None:
    """A list, half an object, no text."""
    with pytest.raises(FrameError, match="message between driver and ranks"):
        Frame.decoded(header, b"")


def test_a_damaged_payload_is_refused() -> None:
    """When its arrays are asked for."""
    with pytest.raises(FrameError, match="no readable payload"):
        Frame(header={}, payload=b"not safetensors").arrays()
