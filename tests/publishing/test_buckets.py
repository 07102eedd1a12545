"""Weights in pieces: what is in each, how it lies there, and what a payload is made of."""

from __future__ import annotations

import base64
import pickletools
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.publishing.torch_buckets import Bucket, as_tensors, make_bucket, payload, plan_buckets

WEIGHTS = {
    "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b.bias": torch.arange(5, dtype=torch.float32),
    "c.scale": torch.tensor(2.5, dtype=torch.float64),
}
# What SGLang 0.5.23's unpickler has on its list, of all that a tensor of bytes and a namespace need.
ALLOWED = {
    "types SimpleNamespace",
    "torch bfloat16",
    "torch float32",
    "torch float64",
    "torch._utils _rebuild_tensor_v2",
    "torch.storage _load_from_bytes",
    "collections OrderedDict",
}


def _read(bucket: Bucket) -> dict[str, torch.Tensor]:
    """As a server does it."""
    found, start = {}, 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        assert start % kind.itemsize == 0
        end = start + kind.itemsize * torch.Size(shape).numel()
        found[name] = bucket.flat[start:end].view(kind).reshape(shape)
        start = end
    assert start == len(bucket.flat)
    return found


def _equal(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("limit_bytes", [1, 20, 30, 10_000])
def test_all_weights_come_out_of_their_buckets(limit_bytes: int) -> None:
    """Each tensor once, whatever the bound, and at an offset that a server accepts."""
    parts = plan_buckets(WEIGHTS, limit_bytes)
    found: dict[str, torch.Tensor] = {}
    for names in parts:
        found |= _read(make_bucket(WEIGHTS, names))
    assert _equal(found, WEIGHTS)
    assert sum(map(len, parts)) == len(WEIGHTS)


@given(
    st.lists(st.tuples(st.sampled_from(["bfloat16", "float32", "float64"]), st.integers(0, 9)), min_size=1),
    st.integers(1, 100),
)
def test_no_bucket_is_larger_than_its_bound(shapes: list[tuple[str, int]], limit_bytes: int) -> None:
    """Unless one tensor alone is; and no two neighbours would have fitted into one."""
    weights = {str(i): torch.zeros(size, dtype=getattr(torch, kind)) for i, (kind, size) in enumerate(shapes)}
    parts = plan_buckets(weights, limit_bytes)
    assert sorted(name for part in parts for name in part) == sorted(weights)
    sizes = [sum(weights[name].nbytes for name in part) for part in parts]
    assert all(size <= limit_bytes or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    for size, following in zip(sizes, parts[1:], strict=False):
        assert size + weights[following[0]].nbytes > limit_bytes
    for part in parts:
        _read(make_bucket(weights, part))


def test_a_payload_names_nothing_but_what_the_server_allows() -> None:
    """Read as a list of instructions, for nothing is unpickled here either."""
    text = payload(make_bucket(WEIGHTS, list(WEIGHTS)), by_handle=True)
    content = base64.b64decode(text, validate=True)
    pushed: list[object] = []
    memory: list[object] = []
    found: set[str] = set()
    for code, argument, _ in pickletools.genops(content):
        match code.name:
            case "GLOBAL":
                found.add(str(argument).replace("\n", " "))
            case "STACK_GLOBAL":
                found.add(" ".join(map(str, pushed[-2:])))
                pushed.append(None)
            case "MEMOIZE":
                memory.append(pushed[-1])
            case "BINGET" | "LONG_BINGET":
                assert isinstance(argument, int)
                pushed.append(memory[argument])
            case _:
                pushed.append(argument)
    assert found == ALLOWED
    assert {"a.weight", "b.bias", "c.scale", "flattened_tensor", "metadata"} < set(pushed)


def test_arrays_of_a_learner_without_torch_are_tensors_too() -> None:
    """The scripted learner has no torch."""
    tensors = as_tensors({"theta:0.5": np.zeros(1, dtype=np.float32)})
    assert torch.equal(tensors["theta:0.5"], torch.zeros(1))
