from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.learning import treeattention
from asyncrl.learning.prefixtrees import Nodes, Pass, passes
from asyncrl.learning.treeattention import SharingError, TreePlan, gathered_attention, looped_attention, tree_attention
from tests.learning.tiny import sequence_of

Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

NESTED = ("aab", "aabcd", "aabce", "aabcef", "aag", "b" * 40, "b" * 30 + "cc", "xy", "xz")
CPU = torch.device("cpu")


def _pass(texts: tuple[str, ...]) -> Pass:
    (one,) = passes([sequence_of(text + ".") for text in texts], 10_000)
    return one


def _plan(one: Pass, dtype: torch.dtype = torch.float32) -> TreePlan:
    assert one.nodes is not None
    assert one.positions is not None
    return TreePlan(one.nodes, longest=int(one.positions.max()) + 1, dtype=dtype, device=CPU)


def _mask(nodes: Nodes) -> torch.Tensor:
    """(T, T) which token sees which, from parent to parent."""
    length = int(nodes.ends[-1])
    seen = np.zeros((length, length), dtype=np.bool_)
    for node, (start, end) in enumerate(zip(nodes.starts, nodes.ends, strict=True)):
        seen[start:end, start:end] = np.tri(end - start, dtype=np.bool_)
        above = nodes.parents[node]
        while above >= 0:
            seen[start:end, nodes.starts[above] : nodes.ends[above]] = True
            above = nodes.parents[above]
    return torch.from_numpy(seen)


def _inputs(one: Pass, *, heads: int, key_heads: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Query, key, value, as models make them: (1, T, heads, d) with the middle axes exchanged."""
    generator = torch.Generator().manual_seed(0)
    length = one.computed_tokens

    def made(count: int) -> torch.Tensor:
        tensor = torch.randn((1, length, count, 16), generator=generator)
        return tensor.to(dtype).transpose(1, 2).requires_grad_()

    return made(heads), made(key_heads), made(key_heads)


def _outcome(attend: Attention, inputs: Inputs) -> list[torch.Tensor]:
    """(1, T, heads, d) and the gradients of query, key, value, if each output matters differently."""
    out = attend(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def _cascade(plan: TreePlan, **options: Any) -> Attention:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return tree_attention(torch.nn.Identity(), query, key, value, None, tree_plan=plan, **options)[0]

    return attend


def _masked(one: Pass) -> Attention:
    assert one.nodes is not None
    mask = _mask(one.nodes)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


def _assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], within: float) -> None:
    for left, right in zip(found, expected, strict=True):
        assert left.shape == right.shape
        assert float((left - right).abs().max()) < within


@pytest.mark.parametrize("small", [0, 8, 64])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_the_cascade_is_attention_with_a_mask(
    monkeypatch: pytest.MonkeyPatch, small: int, heads: int, key_heads: int
) -> None:
    """With its gradients, for few keys of many queries too, and however small nodes are put together."""
    monkeypatch.setattr(treeattention, "_SMALL", small)
    one = _pass(NESTED)
    inputs = _inputs(one, heads=heads, key_heads=key_heads)
    _assert_close(_outcome(_cascade(_plan(one)), inputs), _outcome(_masked(one), inputs), 1e-5)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_so_is_attention_to_gathered_paths(key_heads: int) -> None:
    """The sequences of queries and keys that a GPU's kernel gets, attended to one by one."""
    one = _pass(NESTED)
    inputs, plan = _inputs(one, heads=4, key_heads=key_heads), _plan(one)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return gathered_attention(query, key, value, plan, 0.25, looped_attention)

    _assert_close(_outcome(attend, inputs), _outcome(_masked(one), inputs), 1e-5)


@settings(max_examples=25)
@given(st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=9), st.sampled_from([0, 4, 64]))
def test_any_trees(texts: list[str], small: int) -> None:
    """Nested, repeated, one inside another."""
    one = _pass(tuple(texts))
    inputs = _inputs(one, heads=2, key_heads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(treeattention, "_SMALL", small)
        found = _outcome(_cascade(_plan(one)), inputs)
    _assert_close(found, _outcome(_masked(one), inputs), 1e-5)


def test_its_gradient_is_that_of_finite_differences() -> None:
    """In float64, so that it is not only the same as another kernel's."""
    one = _pass(("abc", "abd", "b"))
    inputs = _inputs(one, heads=2, key_heads=1, dtype=torch.float64)
    plan = _plan(one, torch.float64)
    assert torch.autograd.gradcheck(_cascade(plan), inputs)


def test_sixteen_bits() -> None:
    """As close to float32 as their rounding allows."""
    one = _pass(NESTED)
    inputs = _inputs(one, heads=4, key_heads=2, dtype=torch.bfloat16)
    query, key, value = inputs
    with torch.no_grad():
        found = _cascade(_plan(one, torch.bfloat16))(query, key, value)
        exact = _masked(one)(query.float(), key.float(), value.float())
    assert found.dtype == torch.bfloat16
    assert float((found.float() - exact).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("options", "said"),
    [({"s_aux": torch.zeros(2)}, "s_aux"), ({"softcap": 30.0}, "softcap"), ({"sliding_window": 8}, "window of 8")],
)
def test_what_trees_cannot_is_refused(options: dict[str, object], said: str) -> None:
    """Sinks, soft caps, windows shorter than a path: never a wrong number instead."""
    one = _pass(NESTED)
    inputs = _inputs(one, heads=2, key_heads=2)
    with pytest.raises(SharingError, match=said):
        _cascade(_plan(one), **options)(*inputs)


def test_a_window_as_long_as_the_longest_path_is_none() -> None:
    """Every token sees its whole path."""
    one = _pass(NESTED)
    inputs = _inputs(one, heads=2, key_heads=2)
    plan = _plan(one)
    assert torch.equal(_cascade(plan, sliding_window=plan.longest)(*inputs), _cascade(plan)(*inputs))
