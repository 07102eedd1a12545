"""Attention over prefix trees, registered with transformers under ``TREE_ATTENTION``; the model's code stays as it is.

The plan of a pass comes with each call, as the keyword argument ``tree_plan`` of the model. A token sees the tokens of
its own node up to itself, and all tokens of the nodes above.

On a CPU that is a cascade without masks or gathered keys: each node by itself, causal, and then, for each node, all
queries below it against its keys. Both give an output and the log of the sum of exponentials (lse), by which they are
merged. The backward of a part, given the merged output and lse, is exactly that part's share of the gradient: with
``p = exp(score - lse)`` and ``delta = sum(out * grad)``, the gradient of a score is ``p * (grad . value - delta)``,
whichever call the score belongs to (as in ring attention, arXiv 2310.01889).

Elsewhere the keys and values of each node's path are gathered, and the nodes are sequences of unequal numbers of
queries and keys: one call of torch's varlen attention on CUDA in 16 bits, else one of SDPA for each node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.errors import LearnerError
from asyncrl.learning.prefixtrees import Integers, Nodes

__all__ = [
    "TREE_ATTENTION",
    "Attend",
    "SharingError",
    "TreePlan",
    "gathered_attention",
    "looped_attention",
    "tree_attention",
]

TREE_ATTENTION = "asyncrl_trees"

_SMALL = 64
"""Nodes that have this many tokens together are one call with a mask: less work than that of calling."""

_HARMLESS = frozenset({"dropout", "is_causal", "output_attentions", "position_ids", "use_cache"})
"""What models say to their attention beside, which changes nothing here."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Attend: TypeAlias = Callable[..., Any]


class SharingError(LearnerError):
    """The attention of a model has something that trees have not; the message says what."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Nodes that attend to themselves."""

    tokens: slice
    mask: torch.Tensor | None
    """(n, n) to be added to scores; None if the block is one node: causal."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Queries below a node, and the node's keys."""

    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class _Branches:
    """Nodes as sequences of queries and of keys, which end together."""

    keys: torch.Tensor
    """(K,) tokens whose keys each node sees, node after node."""
    query_bounds: torch.Tensor
    """(M + 1,) int32"""
    key_bounds: torch.Tensor
    """(M + 1,) int32"""
    max_queries: int
    max_keys: int


class TreePlan:
    """Which keys each query of a pass sees; one object for all layers and for the backward pass."""

    def __init__(self, nodes: Nodes, *, longest: int, dtype: torch.dtype, device: torch.device) -> None:
        """``longest``: tokens of the longest path from a root. ``dtype``, ``device``: of the queries."""
        self.longest = longest
        self._nodes, self._dtype, self._device = nodes, dtype, device

    @cached_property
    def cascade(self) -> tuple[list[_Block], list[_Span]]:
        """For the CPU: who attends to itself, and who to the nodes above."""
        nodes = self._nodes
        runs = _runs(nodes)
        spans = [
            _Span(
                queries=slice(end, int(nodes.stops[node])), keys=slice(int(nodes.starts[node]), int(nodes.ends[node]))
            )
            for first, last in runs
            for end in [int(nodes.ends[last])]
            for node in range(first, last + 1)
            if nodes.stops[node] > end
        ]
        return [_block(nodes, first, last, self._dtype) for first, last in runs], spans

    @cached_property
    def branches(self) -> _Branches:
        """For other devices."""
        nodes = self._nodes
        paths: list[Integers] = []
        for start, end, parent in zip(nodes.starts, nodes.ends, nodes.parents, strict=True):
            own = np.arange(start, end)
            paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
        queries, keys = nodes.ends - nodes.starts, np.array([len(path) for path in paths])

        def bounds(lengths: Integers) -> torch.Tensor:
            return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self._device)

        return _Branches(
            keys=torch.from_numpy(np.concatenate(paths)).to(self._device),
            query_bounds=bounds(queries),
            key_bounds=bounds(keys),
            max_queries=int(queries.max()),
            max_keys=int(keys.max()),
        )


def _runs(nodes: Nodes) -> list[tuple[int, int]]:
    """First and last node of each block."""
    runs: list[tuple[int, int]] = []
    for node, end in enumerate(nodes.ends):
        if runs and end - nodes.starts[runs[-1][0]] <= _SMALL:
            runs[-1] = (runs[-1][0], node)
        else:
            runs.append((node, node))
    return runs


def _block(nodes: Nodes, first: int, last: int, dtype: torch.dtype) -> _Block:
    start, end = int(nodes.starts[first]), int(nodes.ends[last])
    if first == last:
        return _Block(tokens=slice(start, end), mask=None)
    token = np.arange(start, end)
    stops = np.repeat(nodes.stops[first : last + 1], (nodes.ends - nodes.starts)[first : last + 1])
    seen = (token[:, None] >= token) & (token[:, None] < stops)  # (queries, keys)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
    return _Block(tokens=slice(start, end), mask=mask)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_plan: TreePlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """(1, T, heads, d) for a query of (1, heads, T, d), as transformers calls it. Raises ``SharingError``."""
    found = [name for name, given in options.items() if given is not None and name not in _HARMLESS]
    if attention_mask is not None or found or query.shape[0] != 1:
        raise SharingError(f"its attention takes {', '.join(found) or 'a mask or several rows'}")
    if sliding_window is not None and tree_plan.longest > sliding_window:
        raise SharingError(f"its window of {sliding_window} tokens is shorter than a path of {tree_plan.longest}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        merged: torch.Tensor = _Cascade.apply(query, key, value, tree_plan, scale)
        return merged, None
    flash = query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)
    return gathered_attention(query, key, value, tree_plan, scale, varlen_attn if flash else looped_attention), None


AttentionInterface.register(TREE_ATTENTION, tree_attention)


class _Cascade(torch.autograd.Function):
    """(1, heads, T, d), (1, key heads, T, d) twice -> (1, T, heads, d)."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: TreePlan, scale: float
    ) -> torch.Tensor:
        ctx.plan, ctx.scale = plan, scale
        _, heads, length, size = query.shape
        out = query.new_empty((1, length, heads, size))
        lse = query.new_empty((1, length, heads), dtype=torch.promote_types(query.dtype, torch.float32))
        outs, lses = out.transpose(1, 2), lse.transpose(1, 2)
        blocks, spans = plan.cascade
        for block in blocks:
            part, part_lse = _forward(
                *(tensor[:, :, block.tokens] for tensor in (query, key, value)),
                is_causal=block.mask is None,
                attn_mask=block.mask,
                scale=scale,
            )
            outs[:, :, block.tokens] = part
            lses[:, :, block.tokens] = part_lse
        for span in spans:
            keys = (tensor[:, :, span.keys] for tensor in (key, value))
            part, part_lse = _forward(query[:, :, span.queries], *keys, scale=scale)
            before = lses[:, :, span.queries]
            outs[:, :, span.queries].lerp_(part, (part_lse - before).sigmoid_()[..., None].to(part.dtype))
            torch.logaddexp(before, part_lse, out=before)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        gradient, out, lse = (tensor.transpose(1, 2) for tensor in (gradients[0].contiguous(), out, lse))
        of_query, of_key, of_value = (torch.empty_like(tensor) for tensor in (query, key, value))

        def part(queries: slice, keys: slice, **mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _backward(
                *(tensor[:, :, queries] for tensor in (gradient, query)),
                *(tensor[:, :, keys] for tensor in (key, value)),
                *(tensor[:, :, queries] for tensor in (out, lse)),
                0.0,
                scale=ctx.scale,
                **mask,
            )
            return grads

        blocks, spans = ctx.plan.cascade
        for block in blocks:
            at = block.tokens
            causal = block.mask is None
            of_query[:, :, at], of_key[:, :, at], of_value[:, :, at] = part(
                at, at, is_causal=causal, attn_mask=block.mask
            )
        for span in spans:
            by_query, by_key, by_value = part(span.queries, span.keys, is_causal=False)
            of_query[:, :, span.queries] += by_query
            of_key[:, :, span.keys] += by_key
            of_value[:, :, span.keys] += by_value
        return of_query, of_key, of_value, None, None


def gathered_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: TreePlan, scale: float, attend: Attend
) -> torch.Tensor:
    """What ``tree_attention`` returns, by ``attend``, which is torch's ``varlen_attn`` or behaves like it."""
    branches = plan.branches
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended: torch.Tensor = attend(
        queries,
        keys.index_select(0, branches.keys),
        values.index_select(0, branches.keys),
        branches.query_bounds,
        branches.key_bounds,
        branches.max_queries,
        branches.max_keys,
        scale=scale,
        # Causal, the last query of a sequence beside its last key.
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[None]


def looped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    *_: int,
    **options: Any,
) -> torch.Tensor:
    """``varlen_attn`` for every device and dtype: SDPA for one sequence after the other."""
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    parts = []
    for (start, end), (first, last) in zip(pairwise(query_bounds.tolist()), pairwise(key_bounds.tolist()), strict=True):
        seen = torch.ones((end - start, last - first), dtype=torch.bool, device=query.device)
        part = scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, first:last],
            values[:, :, first:last],
            attn_mask=seen.tril(last - first - (end - start)),
            scale=options["scale"],
            enable_gqa=options["enable_gqa"],
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)
